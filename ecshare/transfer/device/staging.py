# SPDX-License-Identifier: Apache-2.0
"""Copies device memory to host slabs and back; for loaded KV, see `load_streams`.

A slab is host memory that holds one whole object: room for the prologue, then the payload. The
device copies directly to the payload, the store layer writes the prologue before it, and that one
buffer is sent, so no byte is copied again on its way to the store. All slabs are parts of one
arena, allocated at start: on a GPU of pinned memory, because copies from and to other memory wait
for the device.

On a GPU copies out run on a side stream, ordered after the kernels that wrote the source. No CPU
thread waits, except the one that needs the bytes (`Slab.arrived`), which sleeps and does not spin.
"""

import logging
import mmap
import threading
import warnings
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ecshare.store.buffers import prefer_huge_pages
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec

logger = logging.getLogger(__name__)

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Slabs begin on pages of memory, so that no two share one.
_PAGE_BYTES = mmap.PAGESIZE


def slab_bytes(num_bytes: int) -> int:
    """Return the size of a slab for an object of `num_bytes`, prologue included."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of `dtype`.

    Raises:
        ValueError: the format has no name for it.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ValueError(f"{dtype} has no name in the object format") from None


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype `name`; the reverse of `dtype_name`.

    Raises:
        ValueError: unknown name.
    """
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"no torch dtype for {name!r}") from None


def as_tensor(payload: memoryview, spec: TensorSpec) -> Tensor:
    """View `payload` as the host tensor that `spec` describes; no copy.

    The tensor shares memory with `payload`, which must outlive it. A read-only payload gives a
    tensor that must not be written (torch cannot enforce that).
    """
    if not spec.num_bytes:
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    _warn_of_read_only_memory()
    return torch.frombuffer(payload, dtype=torch_dtype(spec.dtype)).view(spec.shape)


@cache
def _warn_of_read_only_memory() -> None:
    """Trigger, and hide, torch's only warning that tensors over read-only memory can be written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)


@cache
def _warn_of_full_device() -> None:
    logger.warning(
        "The device is almost out of memory: embeddings are loaded into what vLLM has freed, and a "
        "load that finds none ends the engine. Set a lower gpu_memory_utilization."
    )


def is_gpu(device: torch.device) -> bool:
    """Return whether copies from and to `device` are queued on streams."""
    return device.type == "cuda"


class Arena:
    """Host memory that is allocated once, and handed out in parts of whole pages.

    The first free part that is large enough is handed out, so that used memory is reused: the first
    write to a fresh page costs more than the copy into it. On a CPU, pages are fresh until they are
    used.

    Threads: any.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate `num_bytes`, rounded up to whole pages; pinned for `device`, if it is a GPU.

        Memory that cannot be pinned is used as it is, which is slower; a warning is logged.

        Raises:
            OSError: the system does not allocate that much.
        """
        self.num_bytes = slab_bytes(num_bytes)
        memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_DONTFORK"):
            # After a fork the next write moves to a new page, while a device copies to the old one.
            memory.madvise(mmap.MADV_DONTFORK)
        if is_gpu(device):
            # Loads take half the time. All of it is pinned, so none is wasted.
            prefer_huge_pages(memory)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._lock = threading.Lock()
        self._free = [(0, self.num_bytes)]
        # Parts to be freed. A finalizer may return a part while this thread holds the lock.
        self._returned: deque[tuple[int, int]] = deque()
        if is_gpu(device) and _is_pinned(self._memory, device):
            unpin = torch.cuda.cudart().cudaHostUnregister
            weakref.finalize(self, unpin, self._memory.data_ptr()).atexit = False

    def take(self, num_bytes: int) -> Tensor | None:
        """Return that many bytes, uint8; the caller owns them until `give_back`. None: no room."""
        size = slab_bytes(num_bytes)
        with self._lock:
            self._merge()
            for number, (start, free) in enumerate(self._free):
                if free >= size:
                    rest = [(start + size, free - size)] if free > size else []
                    self._free[number : number + 1] = rest
                    return self._memory[start : start + size]
        return None

    def give_back(self, part: Tensor, reader: object | None = None) -> None:
        """Free memory that `take` returned; with a `reader`, once that is garbage-collected."""
        place = int(part.storage_offset()), part.nbytes
        if reader is None:
            self._returned.append(place)
        else:
            weakref.finalize(reader, self._returned.append, place)

    @property
    def used_bytes(self) -> int:
        """Return the size of all parts in use."""
        with self._lock:
            self._merge()
            return self.num_bytes - sum(free for _, free in self._free)

    def _merge(self) -> None:
        """Add returned parts to the free ones, and merge neighbours. The caller holds the lock."""
        while self._returned:
            insort(self._free, self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for start, size in self._free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged


def _is_pinned(memory: Tensor, device: torch.device) -> bool:
    """Pin `memory`, so that copies between it and `device` are asynchronous; warn if it fails."""
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if not code:
            return True
        logger.warning(
            "%d MiB of host memory could not be pinned (CUDA error %d): copies from and to the GPU "
            "are slower and hold up the engine. Is `ulimit -l` or a memory limit in the way?",
            memory.nbytes >> 20,
            code,
        )
        with suppress(RuntimeError):  # the next launch reports that error: launch one here
            torch.zeros(1, device=device)
    return False


class Slab:
    """Host memory for one object: `PROLOGUE_BYTES`, then the payload.

    Ownership: one thread at a time: the vLLM thread fills it, then passes it to the transfer engine
    with a Put, and the engine releases it.
    """

    def __init__(self, staging: "Staging", buffer: Tensor, spec: TensorSpec) -> None:
        """Called by `Staging.reserve` only. `buffer`: uint8, at least prologue and payload long."""
        self.spec = spec
        self._staging = staging
        self._buffer: Tensor | None = buffer
        self._num_bytes = PROLOGUE_BYTES + spec.num_bytes
        self._bytes: Any = buffer[: self._num_bytes].numpy()
        self.copied: torch.cuda.Event | None = None
        """The payload has arrived after this event; None: it has arrived."""
        self.finish: Callable[[], None] | None = None
        """Called once the payload has arrived, before `arrived` returns it."""

    @property
    def body(self) -> memoryview:
        """The whole object, prologue first; writable; valid until `release`."""
        _ = self._whole
        return memoryview(self._bytes)

    @property
    def payload(self) -> Tensor:
        """The payload as a host tensor of the slab's spec; valid until `release`."""
        flat = self._whole[PROLOGUE_BYTES : self._num_bytes]
        return flat.view(torch_dtype(self.spec.dtype)).view(self.spec.shape)

    @property
    def payload_address(self) -> int:
        """Return the memory address of the payload; valid until `release`."""
        return int(self._whole.data_ptr()) + PROLOGUE_BYTES

    def arrived(self) -> memoryview:
        """Block until the copy from the device has arrived, and return `body`. Any thread, once."""
        self._wait()
        if self.finish is not None:
            self.finish()
        return self.body

    def shrink(self, spec: TensorSpec) -> None:
        """Hold an object of `spec` from now on, of at most as many bytes, which are kept.

        The owner's thread, before `body` is used. Earlier tensors of the payload stay valid too.
        """
        buffer = self._whole
        self.spec = spec
        self._num_bytes = PROLOGUE_BYTES + spec.num_bytes
        self._bytes = buffer[: self._num_bytes].numpy()

    def release(self, *, reuse: bool = True) -> None:
        """Return the memory to the budget. A second call does nothing. Any thread.

        Waits for a copy in flight: the memory must not be reused before it has arrived.
        `reuse=False`: a store may still read the memory, which is free once all references to
        `body` are gone.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        self._wait()
        self.finish = None
        read, self._bytes = self._bytes, None
        self._staging.free(buffer, None if reuse else read)

    def _wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()

    @property
    def _whole(self) -> Tensor:
        if self._buffer is None:
            raise RuntimeError("the slab was released")
        return self._buffer


class Staging:
    """Copies between one device and host slabs, within a budget of bytes.

    Threads: `reserve`, `free` and `used_bytes` on any; copies from and to a GPU on vLLM's
    worker thread, copies on a CPU on any.
    """

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        """Use `device` for copies and at most `buffer_bytes` of host memory.

        If the system allocates less, that is the budget, and a warning is logged.
        """
        self._device = device
        self._arena = _largest_arena(buffer_bytes, device)
        self._outward = torch.cuda.Stream(device) if is_gpu(device) else None
        self._inward = torch.cuda.Stream(device) if is_gpu(device) else None
        self._copying_in: deque[Slab] = deque()
        self._lock = threading.Lock()
        self._oversize_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Host memory that slabs in use hold. Any thread."""
        return self._arena.used_bytes + self._oversize_bytes

    def reserve(self, spec: TensorSpec) -> Slab | None:
        """Return a slab for an object of `spec`. None: there is no memory for it, drop this save.

        The budget is used up, or the host has no more. An object larger than the whole budget gets
        memory while no other slab is in use, else it could never be stored; on a GPU its copy
        blocks the engine.
        """
        num_bytes = PROLOGUE_BYTES + spec.num_bytes
        with self._lock:
            if self._oversize_bytes:
                return None
            buffer = self._arena.take(num_bytes)
            if buffer is None and num_bytes > self._arena.num_bytes and not self.used_bytes:
                buffer = _allocated(num_bytes)
                self._oversize_bytes = num_bytes if buffer is not None else 0
        return Slab(self, buffer, spec) if buffer is not None else None

    def copy_out(self, slab: Slab, tensor: Tensor) -> None:
        """Start copying `tensor` (of the slab's shape and dtype, any strides) to `slab`.

        On a CPU the copy is done on return. On a GPU it runs after the kernels launched so far, and
        later ones do not wait for it: the tensor may be released, but not written to.

        Raises:
            torch.OutOfMemoryError: the tensor is not contiguous, and the device has no memory for a
                copy that is. Nothing was copied.
        """
        if self._outward is None:
            slab.payload.copy_(tensor)
            return
        source = tensor.contiguous()
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            slab.payload.copy_(source, non_blocking=True)
            slab.copied = recorded(self._outward)
        # The allocator must not reuse this memory before the side stream has read it.
        source.record_stream(self._outward)

    @contextmanager
    def copying(self, slabs: Sequence[Slab]) -> Iterator[None]:
        """Order the body's copies to `slabs` after all kernels launched so far.

        On a GPU later kernels wait for the copies on the device, so the sources may be overwritten
        or freed in stream order. On a CPU the body copies synchronously.
        """
        if self._outward is None:
            yield
            return
        compute = torch.cuda.current_stream(self._device)
        self._outward.wait_stream(compute)
        try:
            with torch.cuda.stream(self._outward):
                yield
        finally:
            copied = recorded(self._outward)
            for slab in slabs:
                slab.copied = copied
            compute.wait_event(copied)

    def wait_copied(self) -> None:
        """Block until the device has carried out all copies to slabs that were launched so far."""
        if self._outward is not None:
            recorded(self._outward).synchronize()

    def copy_in(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device of `tensor`, which is contiguous and in host memory.

        `tensor` has been read on return. On a GPU the copy goes through pinned memory, on a stream
        of its own, and kernels that are launched from now on wait for it. Without room in pinned
        memory the caller blocks until the copy is done.

        Raises:
            torch.OutOfMemoryError: the device has no memory for it.
        """
        self.free_arrived()
        spec, slab = TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape)), None
        num_bytes = PROLOGUE_BYTES + spec.num_bytes
        if self._inward is not None and num_bytes <= self._arena.num_bytes:
            slab = self.reserve(spec)
        if self._inward is None or slab is None:
            return tensor.to(self._device, copy=True)
        self._copying_in.append(slab)
        slab.payload.copy_(tensor)
        compute = torch.cuda.current_stream(self._device)
        copy, stream = self._empty_like(slab.payload, self._inward, compute)
        with torch.cuda.stream(stream):
            copy.copy_(slab.payload, non_blocking=True)
            slab.copied = recorded(stream)
        copy.record_stream(compute)
        compute.wait_event(slab.copied)
        return copy

    def _empty_like(
        self, tensor: Tensor, side: torch.cuda.Stream, compute: torch.cuda.Stream
    ) -> tuple[Tensor, torch.cuda.Stream]:
        """Return memory on the device for a copy of `tensor`, and the stream to copy on.

        The memory is the side stream's own, so that the copy need not wait for the launches on
        compute: memory that compute has freed may still be in use there. If the device has no more,
        freed memory of compute is used, and the copy is launched on compute, after its last use.
        """
        try:
            with torch.cuda.stream(side):
                return torch.empty_like(tensor, device=self._device), side
        except torch.OutOfMemoryError:
            _warn_of_full_device()
            return torch.empty_like(tensor, device=self._device), compute

    def free_arrived(self) -> None:
        """Free the host memory of copies that `copy_in` has begun and that have arrived."""
        while self._copying_in:
            copied = self._copying_in[0].copied
            if copied is not None and not copied.query():
                return
            self._copying_in.popleft().release()

    def free(self, buffer: Tensor, reader: object | None) -> None:
        """Free a slab's memory; with a `reader`, once that is gone. Called by `Slab.release`."""
        if self._oversize_bytes:
            self._oversize_bytes = 0  # it was the only slab in use
        else:
            self._arena.give_back(buffer, reader)


def _largest_arena(num_bytes: int, device: torch.device) -> Arena:
    """Return an arena of `num_bytes`, or of less if the host has no more."""
    size = num_bytes
    while True:
        try:
            arena = Arena(size, device)
        except OSError:
            size //= 2
            if not size:
                raise
            continue
        if size < num_bytes:
            logger.warning("buffer_bytes: the host gives %d bytes, not %d", size, num_bytes)
        return arena


def _allocated(num_bytes: int) -> Tensor | None:
    """Return that much memory outside any arena; None: the host has no more."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8)
    except (RuntimeError, MemoryError):  # torch raises either
        return None


def recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event in `stream`, after all launches so far.

    A thread that waits for it sleeps: a thread that spins takes a core, and the driver's lock, from
    vLLM.
    """
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event
