# SPDX-License-Identifier: Apache-2.0
"""KV as 8-bit floats: accuracy of the round trip, and hostile bytes."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ecshare.store.errors import StoreError
from kvshare.worker import float8

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ALL_EXPONENTS = range(-15, 8)
ONE_THREAD = 32_768  # numbers of a call: torch takes more threads from here on


def stored(numbers: Tensor) -> Tensor:
    out = torch.empty(*numbers.shape[:-1], numbers.shape[-1] + 1, dtype=torch.uint8)
    float8.encode(numbers, out)
    assert float8.is_sound(out)
    return out


def returned(bytes_: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(*bytes_.shape[:-1], bytes_.shape[-1] - 1, dtype=dtype)
    float8.decode(bytes_, out)
    return out


def bound(numbers: Tensor) -> Tensor:
    """Return the largest error that the documentation allows."""
    sizes = numbers.double().abs()
    of_row = sizes.amax(-1, keepdim=True) / 2**17
    return torch.maximum(sizes / 16, of_row).clamp(min=2.0**-25)


def row_of(*numbers: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.tensor([numbers], dtype=dtype)


@given(
    st.sampled_from(DTYPES),
    st.integers(1, 70),
    st.floats(0, 6),
    st.integers(-40, 16),
    st.integers(0, 2**32),
)
def test_decoded_numbers_are_within_the_bound_and_stable(
    dtype: torch.dtype, width: int, spread: float, size: int, seed: int
) -> None:
    """Rows and the numbers in a row vary widely in magnitude."""
    chance = torch.Generator().manual_seed(seed)
    drawn = torch.randn(3, 5, width, generator=chance)
    drawn *= torch.exp(spread * torch.randn(3, 5, width, generator=chance)) * 2.0**size
    numbers = drawn.clamp(-float8.LARGEST, float8.LARGEST).to(dtype)
    back = returned(stored(numbers), dtype)
    assert bool(((back.double() - numbers.double()).abs() <= bound(numbers)).all())
    assert torch.equal(returned(stored(back), dtype), back)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_largest_numbers_are_decoded_exactly(dtype: torch.dtype) -> None:
    rows = torch.zeros(3, 4, dtype=dtype)
    rows[1] = float8.LARGEST
    rows[2, 1] = -448.0
    assert torch.equal(returned(stored(rows), dtype), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 60_000.0])
def test_numbers_beyond_fp8_are_refused(dtype: torch.dtype, wrong: float) -> None:
    rows = torch.ones(300, 200, dtype=dtype)
    rows[299, 7] = wrong
    with pytest.raises(StoreError, match="not finite"):
        stored(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_encode_works_in_place(
    dtype: torch.dtype, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    numbers = torch.randn(1000, 200).to(dtype)
    memory = torch.empty(numbers.nbytes, dtype=torch.uint8)
    here = memory.view(dtype).view(numbers.shape)
    here.copy_(numbers)
    out = memory[: 1000 * 201].view(1000, 201)
    float8.encode(here, out)
    monkeypatch.undo()
    assert torch.equal(out, stored(numbers))


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_those_of_torch(dtype: torch.dtype) -> None:
    """Compare all codes except NaN, which is never stored, with each exponent."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    for exponent in ALL_EXPONENTS:
        last = torch.tensor([exponent], dtype=torch.int8).view(torch.uint8)
        back = returned(torch.cat([codes, last]).view(1, -1), dtype)
        assert torch.equal(
            back[0].double(), codes.view(torch.float8_e4m3fn).double() * 2.0**exponent
        )


@given(st.sampled_from(DTYPES), st.binary(min_size=12, max_size=12))
def test_any_bytes_are_refused_or_give_finite_numbers(dtype: torch.dtype, content: bytes) -> None:
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(3, 4)
    exponents = rows.view(torch.int8)[:, -1].tolist()
    assert float8.is_sound(rows) == all(each in ALL_EXPONENTS for each in exponents)
    rows.view(torch.int8)[:, -1].clamp_(ALL_EXPONENTS[0], ALL_EXPONENTS[-1])
    assert bool(returned(rows, dtype).isfinite().all())


def test_sliced_and_transposed_rows_are_decoded() -> None:
    numbers = torch.randn(4, 3, 5, 6)
    cut = stored(numbers)[:, 1:].transpose(1, 2)
    assert torch.equal(
        returned(cut, torch.float32),
        returned(stored(numbers), torch.float32)[:, 1:].transpose(1, 2),
    )


class Calls(TorchDispatchMode):
    """Records the size of the largest tensor that a call has made or filled, without views."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.most = max(self.most, result.numel())
        return result


def test_encode_and_decode_stay_below_torchs_threading_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    numbers, out = torch.randn(4000, 100), torch.empty(4000, 101, dtype=torch.uint8)
    back = torch.empty_like(numbers)
    with Calls() as calls:  # type: ignore[no-untyped-call]
        float8.encode(numbers, out)
        float8.decode(out, back)
    assert ONE_THREAD // 2 < calls.most < ONE_THREAD
