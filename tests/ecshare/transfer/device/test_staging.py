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
def test_copy_out_puts_the_bytes_behind_the_prologue(staging: Staging, dtype: torch.dtype) -> None:
    tensor = torch.randn(33, 17).to(dtype)
    slab = staging.reserve(facts(33, 17, dtype=dtype_name(dtype)))
    assert slab is not None
    staging.copy_out(slab, tensor)
    assert len(slab.body) == PROLOGUE_BYTES + tensor.nbytes
    assert bytes(slab.body[PROLOGUE_BYTES:]) == tensor.view(torch.uint8).numpy().tobytes()


def test_copy_out_takes_any_strides(staging: Staging) -> None:
    tensor = torch.randn(8, 64, 16).transpose(0, 1)[3:9, :, ::2]
    slab = staging.reserve(facts(*tensor.shape))
    assert slab is not None
    staging.copy_out(slab, tensor)
    assert torch.equal(slab.payload, tensor)


def test_as_tensor_views_without_a_copy() -> None:
    body = bytearray(torch.arange(6, dtype=torch.float32).numpy().tobytes())
    tensor = as_tensor(memoryview(body), facts(2, 3))
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    body[0:4] = torch.tensor([9.0]).numpy().tobytes()
    assert tensor[0, 0] == 9
    assert as_tensor(memoryview(b""), facts(0, 3)).shape == (0, 3)


def test_the_budget_holds_and_comes_back(staging: Staging) -> None:
    first = staging.reserve(facts(3 * MIB // 4))
    assert first is not None
    assert staging.reserve(facts(MIB // 2)) is None
    first.release()
    first.release()
    second = staging.reserve(facts(3 * MIB // 4))
    assert second is not None
    assert staging.reserve(facts(MIB // 2)) is None


def test_one_object_larger_than_the_budget_goes_alone(staging: Staging) -> None:
    large = staging.reserve(facts(2 * MIB))
    assert large is not None
    assert staging.reserve(facts(1)) is None


def test_a_freed_slab_is_used_again_unless_somebody_may_still_read_it(staging: Staging) -> None:
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


def test_an_embedding_is_copied_out_after_what_computes_it(gpu: Gpu) -> None:
    """And nobody waits for the copy, but who needs the bytes."""
    staging, tensor = Staging(torch.device("cpu"), MIB), torch.ones(4)
    slab = staging.reserve(facts(4))
    assert slab is not None
    slab.payload.zero_()
    staging.copy_out(slab, tensor)
    gpu.compute.launch(lambda: None)
    assert not slab.payload.any(), "later kernels do not wait"
    slab.arrived()
    assert slab.payload.all()


def test_kv_is_copied_out_before_later_kernels_overwrite_it(gpu: Gpu) -> None:
    staging, tensor = Staging(torch.device("cpu"), MIB), torch.ones(4)
    slab = staging.reserve(facts(4))
    assert slab is not None
    with staging.copying([slab]):
        slab.payload.copy_(tensor, non_blocking=True)
    gpu.compute.launch(tensor.zero_)
    slab.arrived()
    assert slab.payload.all()


def test_memory_that_is_given_away_has_been_copied_out(gpu: Gpu) -> None:
    """Its next owner does not launch on vLLM's stream."""
    staging, tensor = Staging(torch.device("cpu"), MIB), torch.ones(4)
    slab = staging.reserve(facts(4))
    assert slab is not None
    staging.copy_out(slab, tensor)
    staging.wait_copied()
    tensor.zero_()
    slab.arrived()
    assert slab.payload.all()


def test_a_slab_that_is_let_go_early_is_not_used_before_its_copy_has_arrived(gpu: Gpu) -> None:
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
    """A GPU that comes to what vLLM launches only when it is told to, or waited for."""
    return stand_in(monkeypatch, is_busy=True)


def test_what_is_copied_out_was_computed_before(busy: Gpu) -> None:
    staging, tensor = Staging(torch.device("cpu"), MIB), torch.zeros(4)
    slab = staging.reserve(facts(4))
    assert slab is not None
    busy.compute.launch(lambda: tensor.fill_(1))
    staging.copy_out(slab, tensor)
    slab.arrived()
    assert slab.payload.all()


def test_blocks_are_copied_out_between_the_kernels_that_fill_and_refill_them(busy: Gpu) -> None:
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


def test_an_embedding_may_be_let_go_while_it_is_copied_out(busy: Gpu) -> None:
    staging = Staging(torch.device("cpu"), MIB)
    for tensor in (torch.ones(4, 2), torch.ones(2, 4).T):  # of the second one a copy is made
        slab = staging.reserve(facts(4, 2))
        assert slab is not None
        staging.copy_out(slab, tensor)
        del tensor
        slab.arrived()
        assert torch.equal(slab.payload, torch.ones(4, 2))


def test_an_embedding_that_was_brought_may_be_let_go_while_it_is_used(busy: Gpu) -> None:
    """Its memory comes from another stream than that of the kernels that use it."""
    staging, used = Staging(torch.device("cpu"), MIB), torch.zeros(4)
    brought = staging.bring(torch.ones(4))
    used.copy_(brought, non_blocking=True)
    del brought
    busy.finish()
    assert torch.equal(used, torch.ones(4))


def test_what_is_loaded_comes_behind_what_was_launched_before(busy: Gpu) -> None:
    """Kernels of before still use the blocks."""
    streams, block, loaded = LoadStreams(torch.device("cpu"), 1024), torch.zeros(4), torch.ones(4)
    busy.compute.launch(lambda: block.fill_(7))
    with streams.after(streams.record()):
        block.copy_(loaded, non_blocking=True)
    busy.finish()
    assert torch.equal(block, torch.ones(4))


def test_an_embedding_is_brought_by_host_memory_that_comes_back(gpu: Gpu) -> None:
    staging, tensor = Staging(torch.device("cpu"), MIB), torch.ones(1000)
    brought = staging.bring(tensor)
    tensor.zero_()  # it was read
    assert brought.all()
    staging.end_brought()
    assert staging.used_bytes == 0


def only_on(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, has_memory: Callable[[Any], bool]) -> None:
    """Let the device have no memory for streams of which `has_memory` is not true."""
    empty_like = torch.empty_like

    def limited(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not has_memory(gpu.current_stream()):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty_like(*args, **kwargs)

    monkeypatch.setattr(torch, "empty_like", limited)


def test_an_embedding_is_brought_to_what_vllm_has_freed_if_there_is_no_more(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = Staging(torch.device("cpu"), MIB)
    only_on(monkeypatch, gpu, lambda stream: stream is gpu.compute)
    assert staging.bring(torch.ones(1000)).all()
    staging.end_brought()
    assert staging.used_bytes == 0


def test_a_full_device_keeps_no_host_memory(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(torch.device("cpu"), MIB)
    only_on(monkeypatch, gpu, lambda stream: False)
    with pytest.raises(torch.OutOfMemoryError):
        staging.bring(torch.ones(1000))
    staging.end_brought()
    assert staging.used_bytes == 0


def test_an_embedding_is_brought_without_room_too(gpu: Gpu) -> None:
    staging = Staging(torch.device("cpu"), 4096)
    full = staging.reserve(TensorSpec("U8", (0,), {}))
    assert full is not None
    assert staging.bring(torch.ones(4)).all()


def test_a_cpu_brings_without_host_memory_of_its_own(staging: Staging) -> None:
    """Nothing is under way after which it could be freed."""
    for _ in range(3):
        assert staging.bring(torch.ones(MIB // 2)).all()
    assert staging.used_bytes == 0


def test_idle_slabs_make_room_for_other_sizes(staging: Staging) -> None:
    for _ in range(3):
        slabs = [staging.reserve(facts(MIB // 8)) for _ in range(4)]
        for slab in slabs:
            assert slab is not None
            slab.release()
    large = staging.reserve(facts(MIB - 2000))
    assert large is not None


def test_a_released_slab_cannot_be_touched(staging: Staging) -> None:
    slab = staging.reserve(facts(4))
    assert slab is not None
    slab.release()
    with pytest.raises(RuntimeError, match="released"):
        _ = slab.body


def test_dtype_names_go_both_ways() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        assert torch_dtype(dtype_name(dtype)) is dtype
    with pytest.raises(ValueError, match="complex64"):
        dtype_name(torch.complex64)
    with pytest.raises(ValueError, match="F7"):
        torch_dtype("F7")
