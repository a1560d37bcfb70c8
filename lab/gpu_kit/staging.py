# SPDX-License-Identifier: Apache-2.0
"""Checks of slabs: host memory, and copies between it and the device."""

import gc

import torch

from ecshare.store.format import PROLOGUE_BYTES, TensorSpec
from ecshare.transfer.device.staging import Arena, Slab, Staging, as_tensor, dtype_name
from lab.gpu_kit.driver import Pinned
from lab.gpu_kit.kit import Bench, Check
from lab.gpu_kit.layouts import DTYPES, bits
from lab.gpu_kit.workers import MIB, drawn


def _reserved(staging: Staging, tensor: torch.Tensor) -> Slab:
    slab = staging.reserve(TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape), {}))
    assert slab is not None, "no room"
    return slab


def copies_to_slabs_keep_every_byte(bench: Bench) -> None:
    """Slabs hold tensors of any dtype, with any strides."""
    staging = Staging(bench.device, 4 * MIB)
    for dtype in DTYPES:
        whole = drawn(300, 64, dtype, bench.device)
        for tensor in (whole, whole[7:100], whole.T, whole[:, ::2]):
            slab = _reserved(staging, tensor)
            staging.copy_out(slab, tensor)
            slab.arrived()
            expected = bits(tensor.contiguous()).cpu()
            assert torch.equal(bits(slab.payload), expected), f"{dtype} {tensor.stride()}"
            slab.release()
    assert staging.used_bytes == 0


def copies_to_the_device_keep_every_byte(bench: Bench) -> None:
    """Read-only memory is copied by way of reused slabs, or directly if they are too small."""
    for num_bytes in (4 * MIB, 4096):
        staging = Staging(bench.device, num_bytes)
        for dtype in DTYPES:
            stored = bits(drawn(300, 64, dtype, torch.device("cpu")))
            view = memoryview(bytes(stored.numpy())).toreadonly()
            spec = TensorSpec(dtype_name(dtype), (300, 64), {})
            copy = staging.copy_in(as_tensor(view, spec))
            bench.finish()
            assert copy.device.type == bench.device.type
            assert torch.equal(bits(copy).cpu(), stored), str(dtype)
        bench.finish()
        staging.free_arrived()
        assert staging.used_bytes == 0


def slabs_are_pinned_and_unpinned(bench: Bench) -> None:
    """All slabs are pinned at the start, and none once nothing uses them."""
    bench.needs_gpu()
    with Pinned().watching() as pinned:
        staging = Staging(bench.device, 3 * MIB)
        assert pinned.num_bytes == 3 * MIB
        slab = _reserved(staging, drawn(8, 8, torch.float32, bench.device))
        assert slab.payload.is_pinned()
        slab.release()
        del staging, slab
        gc.collect()
        assert not pinned.num_bytes, "unused memory stays pinned"


def arena_parts_do_not_overlap(bench: Bench) -> None:
    """Parts do not overlap, even after some were released."""
    arena = Arena(MIB, bench.device)
    first, second = arena.take(300_000), arena.take(300_000)
    assert first is not None
    assert second is not None
    arena.give_back(first)
    third, fourth = arena.take(100_000), arena.take(100_000)
    parts = [each for each in (second, third, fourth) if each is not None]
    assert len(parts) == 3
    for number, part in enumerate(parts):
        part.fill_(number)
    assert all(bool((part == number).all()) for number, part in enumerate(parts))
    assert arena.take(MIB) is None


def slab_is_not_reused_while_a_copy_is_in_flight(bench: Bench) -> None:
    """A copy in flight does not overwrite the memory of the next owner."""
    staging = Staging(bench.device, PROLOGUE_BYTES + MIB)
    tensor = torch.ones(MIB // 4, device=bench.device)
    for _ in range(3):
        slab = _reserved(staging, tensor)
        bench.keep_busy()
        staging.copy_out(slab, tensor)
        slab.release()
        again = _reserved(staging, tensor)
        again.payload.zero_()
        staging.wait_copied()
        assert not again.payload.any()
        again.release()


def tensor_may_be_released_while_it_is_copied(bench: Bench) -> None:
    """The memory of a released tensor is not reused before its copy has run. The link is kept busy,
    so that the copy is late: later kernels do not wait for it.
    """
    staging = Staging(bench.device, 80 * MIB)
    large = drawn(1024, 64 * 1024, torch.uint8, bench.device)
    before, computed = _reserved(staging, large), drawn(1000, 64, torch.float32, bench.device)
    tensor = torch.zeros_like(computed)
    slab = _reserved(staging, tensor)
    bench.finish()
    bench.keep_busy()
    tensor.copy_(computed, non_blocking=True)
    staging.copy_out(before, large)
    staging.copy_out(slab, tensor)
    del tensor
    others = [torch.full_like(computed, 7) for _ in range(8)]
    slab.arrived()
    assert torch.equal(bits(slab.payload), bits(computed).cpu())
    assert all(bool((each == 7).all()) for each in others)


CHECKS: tuple[Check, ...] = (
    copies_to_slabs_keep_every_byte,
    copies_to_the_device_keep_every_byte,
    slabs_are_pinned_and_unpinned,
    arena_parts_do_not_overlap,
    slab_is_not_reused_while_a_copy_is_in_flight,
    tensor_may_be_released_while_it_is_copied,
)
