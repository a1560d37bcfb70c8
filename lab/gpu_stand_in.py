# SPDX-License-Identifier: Apache-2.0
"""A CPU that stands in for a GPU: the order of streams and events, on tensors of the host.

Work on a side stream does not run until something waits for it, as on a busy device: code that
reads or overwrites too early sees the wrong bytes. vLLM's own stream computes at once, unless the
device is busy. A copy from memory that was freed meanwhile reads other bytes, unless that memory
belongs to the copy's own stream. Pinning, the driver and the amount of memory are not simulated.
"""

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ecshare.encoder import worker as encoder_worker
from ecshare.transfer.device import load_streams, staging
from kvshare.worker import blocks
from kvshare.worker import worker as kv_worker

if TYPE_CHECKING:
    import pytest

_device = threading.RLock()
"""Held by the thread that advances the device."""
_OF_OTHERS = 0xA5
"""The bytes in memory that was freed and allocated again."""


class Stream:
    """Work that was launched and has not run. Any thread."""

    def __init__(self, device: Any = None, *, is_prompt: bool = False) -> None:
        """`is_prompt`: work runs when it is launched."""
        self.device = torch.device("cpu")
        self._is_prompt = is_prompt
        self._work: deque[Callable[[], Any]] = deque()
        self._num_done = 0

    @property
    def end(self) -> int:
        """Return the number of works ever launched: a point in the stream."""
        return self._num_done + len(self._work)

    def has_reached(self, end: int) -> bool:
        """Return whether all work before `end` has run."""
        return self._num_done >= end

    def launch(self, work: Callable[[], Any]) -> None:
        """Queue `work`."""
        with _device:
            self._work.append(work)
            if self._is_prompt:
                self.run_to(self.end)

    def run_to(self, end: int) -> None:
        """Run the work that was launched before `end`."""
        with _device, torch.inference_mode():  # a device may write to any tensor
            while self._num_done < end:
                work = self._work.popleft()
                self._num_done += 1
                work()

    def wait_event(self, event: "Event") -> None:
        """Launch a wait for `event`."""
        self.launch(event.synchronize)

    def wait_stream(self, stream: "Stream") -> None:
        """Launch a wait for all work of `stream` so far."""
        event = Event(blocking=True)
        event.record(stream)
        self.wait_event(event)


class Event:
    """A point in a stream. Any thread."""

    def __init__(self, *, blocking: bool = False) -> None:
        """Make an event; refuse one for which a waiting thread would spin."""
        assert blocking, "a thread that waits for this event would spin"
        self._stream: Stream | None = None
        self._end = 0

    def record(self, stream: Stream) -> None:
        """Set the event to the end of `stream`."""
        self._stream, self._end = stream, stream.end

    def query(self) -> bool:
        """Return whether the stream has reached the event."""
        return self._stream is None or self._stream.has_reached(self._end)

    def synchronize(self) -> None:
        """Run the work before the event, as torch's event waits for it."""
        if self._stream is not None:
            self._stream.run_to(self._end)


class Gpu:
    """A stand-in for torch.cuda, and a record of its use."""

    def __init__(self, *, is_busy: bool) -> None:
        """Start with empty streams. `is_busy`: vLLM's stream is late with its work too."""
        self.compute = Stream(is_prompt=not is_busy)
        self._threads = threading.local()
        self.batches: list[int] = []
        """The number of copies of each call."""

    def current_stream(self, device: Any = None) -> Stream:
        """Return the current stream of this thread."""
        current: Stream = getattr(self._threads, "stream", self.compute)
        return current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make `stream` the current one of this thread in the body."""
        before, self._threads.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._threads.stream = before

    def finish(self) -> None:
        """Run all work of vLLM's stream, and the work of other streams that it waits for."""
        self.compute.run_to(self.compute.end)

    def copy_tensor(self, target: Tensor, source: Tensor) -> None:
        """Launch a copy on the current stream. As with CUDA's allocator, it does not keep the
        memory of `source`.
        """
        stream, storage = self.current_stream(), source.untyped_storage()
        if stream in self._streams_of(storage):
            # The next owner of this memory uses it later in the same stream.
            stream.launch(partial(_REAL_COPY, target, source))
            return
        place = (source.storage_offset(), source.shape, source.stride())
        stream.launch(partial(_copy_from, weakref.ref(storage), source.dtype, place, target))

    def allocate_like(self, *args: Any, **kwargs: Any) -> Tensor:
        """Allocate memory of the current stream, as torch's `empty_like` does."""
        result = _REAL_EMPTY_LIKE(*args, **kwargs)
        vars(result.untyped_storage())["streams"] = {self.current_stream()}
        return result

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Keep the memory of `tensor` for the work of `stream` so far, and its later copies."""
        self._streams_of(tensor.untyped_storage()).add(stream)
        stream.launch(partial(_keep, tensor))

    def _streams_of(self, storage: torch.UntypedStorage) -> set[Stream]:
        """Return the streams that freed memory waits for before it is allocated again."""
        streams: set[Stream] = vars(storage).setdefault("streams", {self.compute})
        return streams

    def copy(self, sources: Any, targets: Any, sizes: Any) -> None:
        """Copy a batch as the driver does: read the addresses now, the bytes in stream order."""
        self.batches.append(len(sizes))
        copies = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))

        def work() -> None:
            for copy in copies:
                ctypes.memmove(*copy)

        self.current_stream().launch(work)


_REAL_COPY = Tensor.copy_
_REAL_EMPTY_LIKE = torch.empty_like


def _copy_from(
    freed: "weakref.ref[torch.UntypedStorage]", dtype: torch.dtype, place: Any, target: Tensor
) -> None:
    """Copy the bytes that are at `place` of that memory now."""
    storage = freed()
    if storage is None:
        target.view(torch.uint8).fill_(_OF_OTHERS)
        return
    _REAL_COPY(target, torch.empty(0, dtype=dtype).set_(storage, *place))


def _keep(tensor: Tensor) -> None:
    """Do nothing: until a stream reaches this, it holds the memory of `tensor`."""


def stand_in(monkeypatch: "pytest.MonkeyPatch", *, is_busy: bool = False) -> Gpu:
    """Have this CPU stand in for a GPU until the test ends.

    `is_busy`: work on vLLM's stream waits too, like that of all other streams. Operations of torch
    that a test calls still run at once, except copies with `non_blocking`: with these a test plays
    vLLM's kernels.
    """
    gpu = Gpu(is_busy=is_busy)
    real_to = Tensor.to

    def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            return _REAL_COPY(target, source)
        gpu.copy_tensor(target, source)
        return target

    def to(tensor: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        if not non_blocking:
            return real_to(tensor, *args, **kwargs)
        result = gpu.allocate_like(tensor)
        gpu.copy_tensor(result, tensor)
        return result

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", gpu.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", gpu.current_stream)
    monkeypatch.setattr(torch, "empty_like", gpu.allocate_like)
    monkeypatch.setattr(Tensor, "copy_", copy_)
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "record_stream", lambda *args: gpu.record_stream(*args))
    for module in (staging, load_streams, blocks, encoder_worker, kv_worker):
        monkeypatch.setattr(module, "is_gpu", lambda device: True)
    monkeypatch.setattr(staging, "_is_pinned", lambda memory, device: False)
    monkeypatch.setattr(blocks, "device_copier", lambda: gpu.copy)
    return gpu
