# SPDX-License-Identifier: Apache-2.0
"""Device memory to host slabs and back.

A slab is a host buffer that holds one whole object: room for the prologue, then the payload. The
device copies straight to the payload's place, the store layer writes the prologue before it, and
that one buffer goes to the wire, so a save copies each byte once.

On a GPU the copy runs on a side stream, ordered after the kernels that wrote the source; kernels
launched later wait for it on the device. So the source may be overwritten or freed right away in
stream order, and no CPU thread waits except the one that needs the bytes (`Slab.arrived`).
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from ecshare.store.format import PROLOGUE_BYTES, TensorSpec

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
# Slabs come in sizes of whole granules, so that a freed one fits the next object of about its size.
_GRANULE_BYTES = 256 * 1024


def slab_bytes(num_bytes: int, *, is_pinned: bool) -> int:
    """Return the size of a slab for an object of `num_bytes`, prologue included.

    torch's allocator of pinned memory rounds each request up to a power of two (PyTorch 2.13,
    CachingHostAllocator): what it takes anyway is asked for, so that the budget counts it.
    """
    if is_pinned:
        return max(_GRANULE_BYTES, 1 << (num_bytes - 1).bit_length())
    return -(-num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES


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
    """Use up torch's one warning that tensors over read-only memory can be written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)


class Slab:
    """A host buffer for one object: `PROLOGUE_BYTES`, then the payload.

    Ownership: whoever holds it, one at a time: the vLLM thread fills it, then hands it to the
    transfer engine with a Put, and the engine releases it.
    """

    def __init__(self, staging: "Staging", buffer: Tensor, spec: TensorSpec) -> None:
        """Made by `Staging.reserve` only. `buffer`: uint8, at least prologue and payload long."""
        self.spec = spec
        self._staging = staging
        self._buffer: Tensor | None = buffer
        self.copied: torch.cuda.Event | None = None
        self._num_bytes = PROLOGUE_BYTES + spec.num_bytes

    @property
    def body(self) -> memoryview:
        """The whole object, prologue first; writable; valid until `release`."""
        return memoryview(self._whole.numpy())[: self._num_bytes]  # type: ignore[arg-type]

    @property
    def payload(self) -> Tensor:
        """The payload as a host tensor of the slab's spec; valid until `release`."""
        flat = self._whole[PROLOGUE_BYTES : self._num_bytes]
        return flat.view(torch_dtype(self.spec.dtype)).view(self.spec.shape)

    def arrived(self) -> memoryview:
        """Block until the copy from the device has arrived, and return `body`. Any thread."""
        self._wait()
        return self.body

    def release(self, *, reuse: bool = True) -> None:
        """Give the memory back to the budget. The second call does nothing. Any thread.

        Waits for a copy that is still arriving: the memory must not be used again before.
        `reuse=False`: somebody may still read it: it is freed when they let go, not filled again.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._wait()
            self._staging.take_back(buffer, reuse=reuse)

    def _wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()

    @property
    def _whole(self) -> Tensor:
        if self._buffer is None:
            raise RuntimeError("the slab was released")
        return self._buffer


class Staging:
    """Copies between one device and host slabs, under a byte budget.

    Freed slabs are kept and used again: fresh pages cost more than the copy into them.

    Threads: `reserve` and `take_back` on any; copies from a GPU on vLLM's worker thread, others on
    any. One lock guards the free list and the two sums, for a few list operations at a time.
    """

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        """Use `device` for copies; keep at most `buffer_bytes` of host memory, idle slabs too."""
        self._device = device
        self._limit_bytes = buffer_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()
        self._idle: dict[int, list[Tensor]] = {}
        self._used_bytes = 0
        self._idle_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Host memory that slabs in use hold. Any thread."""
        return self._used_bytes

    def reserve(self, spec: TensorSpec) -> Slab | None:
        """Return a slab for an object of `spec`. None: there is no memory for it, drop this save.

        The budget is spent, or the host has no more. One object larger than the whole budget may go
        alone, else it could never be stored.
        """
        size = slab_bytes(PROLOGUE_BYTES + spec.num_bytes, is_pinned=self._stream is not None)
        with self._lock:
            if self._used_bytes and self._used_bytes + size > self._limit_bytes:
                return None
            self._used_bytes += size
            buffer = self._reuse(size)
        try:
            if buffer is None:
                buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
        except (RuntimeError, MemoryError):  # torch says either when there is no more
            with self._lock:
                self._used_bytes -= size
            return None
        return Slab(self, buffer, spec)

    def copy_out(self, slab: Slab, tensor: Tensor) -> None:
        """Start copying `tensor` (of the slab's shape and dtype, any strides) to `slab`.

        On a CPU the copy is done on return. On a GPU see the module's docstring.
        """
        if self._stream is None:
            slab.payload.copy_(tensor)
            return
        source = tensor.contiguous()
        self._send(slab, source, self._stream)
        if source.data_ptr() == tensor.data_ptr():
            # Later kernels may write to the source itself: let them wait for the copy.
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def fill(self, slab: Slab, write: Callable[[Tensor], None]) -> None:
        """Have `write` fill a tensor of the slab's shape, on this device, for `slab`.

        On a CPU that is the slab itself, so each byte is copied once, and done on return. On a GPU
        it is copied out from there as by `copy_out`; what `write` reads may be overwritten in
        stream order.
        """
        if self._stream is None:
            write(slab.payload)
            return
        spec = slab.spec
        gathered = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=self._device)
        write(gathered)
        self._send(slab, gathered, self._stream)

    def take_back(self, buffer: Tensor, *, reuse: bool) -> None:
        """Return a slab's memory. Called by `Slab.release`. Any thread."""
        with self._lock:
            self._used_bytes -= buffer.nbytes
            if reuse and self._used_bytes + self._idle_bytes + buffer.nbytes <= self._limit_bytes:
                self._idle.setdefault(buffer.nbytes, []).append(buffer)
                self._idle_bytes += buffer.nbytes

    def _reuse(self, size: int) -> Tensor | None:
        """Take an idle buffer of `size`, or drop idle ones until `size` more fits. Locked."""
        if self._idle.get(size):
            self._idle_bytes -= size
            return self._idle[size].pop()
        while self._idle_bytes and self._used_bytes + self._idle_bytes > self._limit_bytes:
            largest = max(capacity for capacity, buffers in self._idle.items() if buffers)
            self._idle[largest].pop()
            self._idle_bytes -= largest
        return None

    def _send(self, slab: Slab, source: Tensor, stream: torch.cuda.Stream) -> None:
        """Copy contiguous device tensor `source` to `slab` on the side stream."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            slab.payload.copy_(source, non_blocking=True)
            slab.copied = stream.record_event()
        # The allocator must not hand this memory out again before the side stream has read it.
        source.record_stream(stream)


class Inflow:
    """Writes to one device on threads that are not vLLM's, in order with what vLLM has launched."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> torch.cuda.Event | None:
        """Return a point in vLLM's stream: after all it has launched so far. vLLM's thread."""
        if self._stream is None:
            return None
        mark: torch.cuda.Event = torch.cuda.current_stream(self._stream.device).record_event()
        return mark

    @contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Have what the body launches come after `mark`; return when it is done. Load threads.

        On a CPU the body does its work itself, and at once.
        """
        if self._stream is None or mark is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield
            self._stream.record_event().synchronize()
