# SPDX-License-Identifier: Apache-2.0
from unittest.mock import Mock

import pytest
import torch

from ecshare.store.format import PROLOGUE_BYTES, TensorSpec
from ecshare.transfer import staging as module
from ecshare.transfer.staging import Staging, as_tensor, dtype_name, torch_dtype

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


def test_a_slab_is_filled_in_place(staging: Staging) -> None:
    slab = staging.reserve(facts(2, 5))
    assert slab is not None
    filled: list[torch.Tensor] = []

    def write(out: torch.Tensor) -> None:
        filled.append(out.fill_(3.0))

    staging.fill(slab, write)
    assert slab.payload.tolist() == [[3.0] * 5] * 2
    assert filled[0].data_ptr() == slab.payload.data_ptr()


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


def test_without_host_memory_an_object_is_dropped_and_the_budget_whole(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", Mock(side_effect=RuntimeError("can't allocate memory")))
        assert staging.reserve(facts(4)) is None
    assert staging.used_bytes == 0
    assert staging.reserve(facts(4)) is not None


def test_a_pinned_slab_counts_what_torch_takes_for_it() -> None:
    """It rounds up to a power of two: 1.1 MiB would be counted for 2."""
    sizes = [1, 256 * 1024, MIB, MIB + 1]
    assert [module.slab_bytes(each, is_pinned=True) for each in sizes] == [
        256 * 1024,
        256 * 1024,
        MIB,
        2 * MIB,
    ]
    assert module.slab_bytes(MIB + 1, is_pinned=False) == MIB + 256 * 1024


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
