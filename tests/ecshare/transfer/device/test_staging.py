# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ecshare.store.format import PROLOGUE_BYTES, TensorSpec
from ecshare.transfer.device.load_streams import LoadStreams
from ecshare.transfer.device.staging import Staging, as_tensor, dtype_name, torch_dtype
from lab.gpu_stand_in import Gpu, Stream, stand_in

MIB = 1 << 20


def facts(*shape: int, dtype: str = "F32") -> TensorSpec:
    return TensorSpec(dtype, shape, {})


@pytest.fixture
def staging() -> Staging:
    return Staging(torch.device("cpu"), 4 * MIB)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.uint8])
def test_copy_out_writes_after_the_prologue(staging: Staging, dtype: torch.dtype) -> None:
    tensor = torch.randn(33, 17).to(dtype)
    slab = staging.reserve(facts(33, 17, dtype=dtype_name(dtype)))
    assert slab is not None
    staging.copy_out(slab, tensor)
    assert len(slab.body) == PROLOGUE_BYTES + tensor.nbytes
    assert bytes(slab.body[PROLOGUE_BYTES:]) == tensor.view(torch.uint8).numpy().tobytes()


def test_copy_out_accepts_any_strides(staging: Staging) -> None:
    tensor = torch.randn(8, 64, 16).transpose(0, 1)[3:9, :, ::2]
    slab = staging.reserve(facts(*tensor.shape))
    assert slab is not None
    staging.copy_out(slab, tensor)
    assert torch.equal(slab.payload, tensor)


def test_as_tensor_does_not_copy() -> None:
    body = bytearray(torch.arange(6, dtype=torch.float32).numpy().tobytes())
    tensor = as_tensor(memoryview(body), facts(2, 3))
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    body[0:4] = torch.tensor([9.0]).numpy().tobytes()
    assert tensor[0, 0] == 9
    assert as_tensor(memoryview(b""), facts(0, 3)).shape == (0, 3)


def test_budget_limits_slabs_and_is_released(staging: Staging) -> None:
    first = staging.reserve(facts(3 * MIB // 4))
    assert first is not None
    assert staging.reserve(facts(MIB // 2)) is None
    first.release()
    first.release()
    second = staging.reserve(facts(3 * MIB // 4))
    assert second is not None
    assert staging.reserve(facts(MIB // 2)) is None


def test_slab_larger_than_the_budget_is_reserved_alone(staging: Staging) -> None:
    large = staging.reserve(facts(2 * MIB))
    assert large is not None
    assert staging.reserve(facts(1)) is None


def test_freed_slab_is_reused_unless_it_may_still_be_read(staging: Staging) -> None:
    first = staging.reserve(facts(1000))
    assert first is not None
    place = first.payload.data_ptr()
    first.release()
    second = staging.reserve(facts(900))
    assert second is not None
    assert second.payload.data_ptr() == place
    reader = second.body
    second.payload.fill_(7)
    second.release(reuse=False)
    third = staging.reserve(facts(900))
    assert third is not None
    third.payload.fill_(0)
    assert (
        bytes(reader[PROLOGUE_BYTES : PROLOGUE_BYTES + 4]) == torch.tensor([7.0]).numpy().tobytes()
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return stand_in(monkeypatch)


def test_copy_out_runs_after_earlier_kernels_without_blocking(gpu: Gpu) -> None:
    """Only `arrived` waits for the copy."""
    staging, tensor = Staging(torch.device("cpu"), MIB), torch.ones(4)
    slab = staging.reserve(facts(4))
    assert slab is not None
    slab.payload.zero_()
    staging.copy_out(slab, tensor)
    gpu.compute.launch(lambda: None)
    assert not slab.payload.any(), "later kernels do not wait"
    slab.arrived()
    assert slab.payload.all()


def test_kv_is_copied_out_before_later_kernels(gpu: Gpu) -> None:
    staging, tensor = Staging(torch.device("cpu"), MIB), torch.ones(4)
    slab = staging.reserve(facts(4))
    assert slab is not None
    with staging.copying([slab]):
        slab.payload.copy_(tensor, non_blocking=True)
    gpu.compute.launch(tensor.zero_)
    slab.arrived()
    assert slab.payload.all()


def test_wait_copied_finishes_copies_before_memory_is_freed(gpu: Gpu) -> None:
    """The memory's next owner does not use vLLM's stream."""
    staging, tensor = Staging(torch.device("cpu"), MIB), torch.ones(4)
    slab = staging.reserve(facts(4))
    assert slab is not None
    staging.copy_out(slab, tensor)
    staging.wait_copied()
    tensor.zero_()
    slab.arrived()
    assert slab.payload.all()


def test_released_slab_is_not_reused_before_its_copy_ends(gpu: Gpu) -> None:
    staging = Staging(torch.device("cpu"), MIB)
    slab = staging.reserve(facts(4))
    assert slab is not None
    staging.copy_out(slab, torch.ones(4))
    slab.release()
    again = staging.reserve(facts(4))
    assert again is not None
    again.payload.zero_()
    gpu.compute.wait_stream(Stream())
    assert slab.copied is not None
    slab.copied.synchronize()
    assert not again.payload.any()


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Make a GPU that runs vLLM's kernels only when a test says so or waits for them."""
    return stand_in(monkeypatch, is_busy=True)


def test_copy_out_waits_for_earlier_kernels_of_a_busy_gpu(busy: Gpu) -> None:
    staging, tensor = Staging(torch.device("cpu"), MIB), torch.zeros(4)
    slab = staging.reserve(facts(4))
    assert slab is not None
    busy.compute.launch(lambda: tensor.fill_(1))
    staging.copy_out(slab, tensor)
    slab.arrived()
    assert slab.payload.all()


def test_blocks_are_copied_out_between_filling_and_refilling_kernels(busy: Gpu) -> None:
    staging, tensor = Staging(torch.device("cpu"), MIB), torch.zeros(4)
    for waits in (lambda slab: slab.arrived(), lambda _: busy.finish()):
        slab = staging.reserve(facts(4))
        assert slab is not None
        busy.compute.launch(lambda: tensor.fill_(1))
        with staging.copying([slab]):
            slab.payload.copy_(tensor, non_blocking=True)
        busy.compute.launch(tensor.zero_)
        waits(slab)
        slab.arrived()
        assert slab.payload.all()
        busy.finish()


def test_embedding_may_be_freed_while_it_is_copied_out(busy: Gpu) -> None:
    staging = Staging(torch.device("cpu"), MIB)
    for tensor in (torch.ones(4, 2), torch.ones(2, 4).T):  # the second one needs a copy
        slab = staging.reserve(facts(4, 2))
        assert slab is not None
        staging.copy_out(slab, tensor)
        del tensor
        slab.arrived()
        assert torch.equal(slab.payload, torch.ones(4, 2))


def test_loaded_embedding_may_be_freed_while_kernels_use_it(busy: Gpu) -> None:
    """Its memory was allocated on another stream than that of the kernels."""
    staging, used = Staging(torch.device("cpu"), MIB), torch.zeros(4)
    brought = staging.copy_in(torch.ones(4))
    used.copy_(brought, non_blocking=True)
    del brought
    busy.finish()
    assert torch.equal(used, torch.ones(4))


def test_loads_run_after_earlier_kernels(busy: Gpu) -> None:
    """Earlier kernels still use the blocks."""
    streams, block, loaded = LoadStreams(torch.device("cpu"), 1024), torch.zeros(4), torch.ones(4)
    busy.compute.launch(lambda: block.fill_(7))
    with streams.after(streams.record()):
        block.copy_(loaded, non_blocking=True)
    busy.finish()
    assert torch.equal(block, torch.ones(4))


def test_host_memory_of_a_loaded_embedding_is_released(gpu: Gpu) -> None:
    staging, tensor = Staging(torch.device("cpu"), MIB), torch.ones(1000)
    brought = staging.copy_in(tensor)
    tensor.zero_()  # it has been read
    assert brought.all()
    staging.free_arrived()
    assert staging.used_bytes == 0


def only_on(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, has_memory: Callable[[Any], bool]) -> None:
    """Let allocations fail on streams for which `has_memory` is false."""
    empty_like = torch.empty_like

    def limited(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not has_memory(gpu.current_stream()):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty_like(*args, **kwargs)

    monkeypatch.setattr(torch, "empty_like", limited)


def test_load_uses_memory_vllm_freed_if_the_device_is_full(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = Staging(torch.device("cpu"), MIB)
    only_on(monkeypatch, gpu, lambda stream: stream is gpu.compute)
    assert staging.copy_in(torch.ones(1000)).all()
    staging.free_arrived()
    assert staging.used_bytes == 0


def test_failed_load_on_a_full_device_releases_host_memory(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = Staging(torch.device("cpu"), MIB)
    only_on(monkeypatch, gpu, lambda stream: False)
    with pytest.raises(torch.OutOfMemoryError):
        staging.copy_in(torch.ones(1000))
    staging.free_arrived()
    assert staging.used_bytes == 0


def test_embedding_is_loaded_without_free_staging_memory(gpu: Gpu) -> None:
    staging = Staging(torch.device("cpu"), 4096)
    full = staging.reserve(TensorSpec("U8", (0,), {}))
    assert full is not None
    assert staging.copy_in(torch.ones(4)).all()


def test_load_on_a_cpu_uses_no_staging_memory(staging: Staging) -> None:
    """There is no copy in flight whose end would release it."""
    for _ in range(3):
        assert staging.copy_in(torch.ones(MIB // 2)).all()
    assert staging.used_bytes == 0


def test_idle_slabs_are_freed_for_other_sizes(staging: Staging) -> None:
    for _ in range(3):
        slabs = [staging.reserve(facts(MIB // 8)) for _ in range(4)]
        for slab in slabs:
            assert slab is not None
            slab.release()
    large = staging.reserve(facts(MIB - 2000))
    assert large is not None


def test_released_slab_cannot_be_used(staging: Staging) -> None:
    slab = staging.reserve(facts(4))
    assert slab is not None
    slab.release()
    with pytest.raises(RuntimeError, match="released"):
        _ = slab.body


def test_dtype_names_convert_both_ways() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        assert torch_dtype(dtype_name(dtype)) is dtype
    with pytest.raises(ValueError, match="complex64"):
        dtype_name(torch.complex64)
    with pytest.raises(ValueError, match="F7"):
        torch_dtype("F7")
