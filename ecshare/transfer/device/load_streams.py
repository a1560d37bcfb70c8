# SPDX-License-Identifier: Apache-2.0
"""Copies host memory to blocks on a GPU, through pinned buffers, off vLLM's threads."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import torch
from torch import Tensor

from ecshare.transfer.device.staging import Arena, is_gpu, recorded, slab_bytes

# At most this many threads write to a GPU at a time, each with two buffers: one is filled while the
# other is copied to the device. One core fills a tenth of what the link takes.
_NUM_STREAMS = 4


class LoadStream:
    """A stream to a GPU, and the pinned memory that its copies read.

    Ownership: one thread at a time, see `LoadStreams.after`.
    """

    def __init__(self, device: torch.device, buffers: Sequence[Tensor]) -> None:
        """Use `buffers` in turn; they are uint8 and of one size."""
        self.stream = torch.cuda.Stream(device)
        self.buffer_bytes = buffers[0].nbytes
        self._buffers = deque((buffer, recorded(self.stream)) for buffer in buffers)

    def buffer(self) -> Tensor:
        """Block until a buffer may be filled, and return it. Call `sent` after its copies."""
        buffer, sent = self._buffers[0]
        sent.synchronize()
        return buffer

    def sent(self) -> None:
        """Record that the copies from the last `buffer` have been launched."""
        buffer, _ = self._buffers.popleft()
        self._buffers.append((buffer, recorded(self.stream)))

    def wait(self) -> None:
        """Block until all launched copies are done."""
        recorded(self.stream).synchronize()


class LoadStreams:
    """Writes to one device off vLLM's threads, after the kernels that vLLM has launched."""

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        """On a GPU, pin memory for copies of up to `buffer_bytes` each: eight times that in total.

        Raises:
            OSError: the system does not allocate that much.
        """
        self._device = device
        self._idle: SimpleQueue[LoadStream] = SimpleQueue()
        if is_gpu(device):
            self._arena = Arena(2 * _NUM_STREAMS * slab_bytes(buffer_bytes), device)
            while (one := self._arena.take(buffer_bytes)) is not None:
                other = self._arena.take(buffer_bytes)
                assert other is not None
                self._idle.put(LoadStream(device, (one[:buffer_bytes], other[:buffer_bytes])))

    def record(self) -> torch.cuda.Event | None:
        """Return an event in vLLM's stream, after all launches so far. vLLM's thread."""
        if not is_gpu(self._device):
            return None
        return recorded(torch.cuda.current_stream(self._device))

    @contextmanager
    def after(self, event: torch.cuda.Event | None) -> Iterator[LoadStream | None]:
        """Order the body's launches after `event`, and wait until they are done. Load threads.

        They are done even if the body raises: nothing is written to the device after this. The
        stream that is yielded is the current one in the body. On a CPU there is no stream: the body
        copies synchronously.
        """
        if event is None:
            yield None
            return
        stream = self._idle.get()
        try:
            with torch.cuda.stream(stream.stream):
                stream.stream.wait_event(event)
                try:
                    yield stream
                finally:
                    stream.wait()
        finally:
            self._idle.put(stream)
