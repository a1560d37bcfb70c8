# SPDX-License-Identifier: Apache-2.0
"""Converts KV to 8-bit floats for the store, and back to caches of 16 or 32 bits; pure.

A row is the content of the cache for one token and head. It is stored as one byte for each number
and one more: the numbers divided by a power of two, as torch's float8_e4m3fn, and that power's
exponent. So a row is complete by itself, and rows can be sliced and reordered as in the cache. With
m the largest magnitude of its row, a number x is decoded as y with

    |y - x| <= max(|x| / 16, m / 2**17, 2**-25)

A decoded number that is stored again is decoded to the same number. A row with NaN, infinity or a
magnitude above LARGEST cannot be stored. Bytes that pass `is_sound` are decoded to finite numbers,
even if an attacker wrote them.

Torch splits calls for 32,768 numbers and more over several threads, if it has them. The other cores
compute requests, so all calls are for fewer numbers then. If torch has one thread, as in vLLM's
workers on GPUs, calls are for more numbers, because each call waits for the interpreter's lock.
"""

from collections.abc import Callable
from functools import cache
from typing import Final

import torch
from msgspec import structs
from torch import Tensor

from ecshare.store.errors import StoreError
from ecshare.store.format import TensorSpec
from ecshare.transfer.device.staging import Slab

NAME: Final = "fp8"
_LEAST, _MOST = (
    -15,
    7,
)  # exponents: with all between, what comes back is exact and finite in float16
LARGEST: Final = 448.0 * 2**_MOST
"""The largest magnitude that can be stored."""
_ALONE, _AMONG_OTHERS = 1 << 18, (1 << 15) - 1  # numbers of a call
# Exponents are computed for this many pieces at once, which costs less than one by one.
_PIECES = 64


def stored_spec(spec: TensorSpec) -> TensorSpec:
    """Return the spec of the stored tensor for numbers of `spec`."""
    *outer, width = spec.shape
    attributes = {**spec.attributes, "stored_dtype": NAME}
    return structs.replace(spec, dtype="U8", shape=(*outer, width + 1), attributes=attributes)


def pack(slab: Slab, finish: Callable[[], None] | None) -> None:
    """Call `finish`, then encode the payload of `slab` in place.

    Raises:
        StoreError: the payload cannot be encoded.
    """
    if finish is not None:
        finish()
    numbers = slab.payload
    slab.shrink(stored_spec(slab.spec))
    encode(numbers, slab.payload)


def encode(numbers: Tensor, out: Tensor) -> None:
    """Encode `numbers` [..., width] to `out`, uint8 [..., width + 1].

    Both are contiguous tensors of the host; they may begin at the same byte.

    Raises:
        StoreError: a number cannot be encoded; the content of `out` is undefined then.
    """
    rows, stored = _rows(numbers), _rows(out)
    step = _rows_at_once(rows)
    for batch, target in zip(rows.split(step * _PIECES), stored.split(step * _PIECES), strict=True):
        pieces = batch.split(step)
        largest = torch.cat([piece.abs().amax(1) for piece in pieces]).float()
        if not bool((largest <= LARGEST).all()):  # this is also False for NaN
            raise StoreError(f"a number of the KV is above {LARGEST:g} or not finite")
        exponents = _exponents(largest)
        factors = _powers(rows.dtype, 0, -1)[exponents - _LEAST].unsqueeze(1)
        codes = target.view(torch.float8_e4m3fn)[:, :-1]
        for piece, factor, to in zip(pieces, factors.split(step), codes.split(step), strict=True):
            to.copy_(piece * factor)
        # After all pieces, because in place these bytes overwrite numbers.
        target[:, -1] = exponents.to(torch.int8).view(torch.uint8)


def is_sound(stored: Tensor) -> bool:
    """Return whether `encode` could have written these bytes. They may be an attacker's."""
    exponents = stored.view(torch.int8)[..., -1].numpy()
    return not exponents.size or bool(exponents.min() >= _LEAST and exponents.max() <= _MOST)


def decode(stored: Tensor, out: Tensor) -> None:
    """Decode `stored`, uint8 [..., width + 1], to `out` [..., width].

    Both are tensors of the host. `stored` is sound, of any strides; `out` is contiguous.

    The bits of a code, shifted, are a number of `out.dtype` with a smaller exponent. Torch's own
    conversion is several times slower. It returns NaN for the code that is 480 here.
    """
    target = _rows(out)
    # Numpy copies in this thread only.
    rows = torch.from_numpy(stored.numpy().reshape(len(target), -1)).view(torch.int8)
    mantissa_bits, extra_exponent, whole = _layout(out.dtype)
    shift = mantissa_bits - 3
    mask = ~((1 << 8 * whole.itemsize - 1) - 1) | 0x7F << shift  # the sign, and the code's bits
    powers = _powers(out.dtype, extra_exponent, 1)
    factors = powers[rows[:, -1].to(torch.int64) - _LEAST].unsqueeze(1)
    step = _rows_at_once(target)
    for codes, factor, to in zip(
        rows[:, :-1].split(step), factors.split(step), target.split(step), strict=True
    ):
        bits = codes.to(whole).bitwise_left_shift_(shift).bitwise_and_(mask)
        torch.mul(bits.view(out.dtype), factor, out=to)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])


def _rows_at_once(rows: Tensor) -> int:
    numbers = _ALONE if torch.get_num_threads() == 1 else _AMONG_OTHERS
    return max(1, numbers // rows.shape[1])


def _exponents(largest: Tensor) -> Tensor:
    """Return for each magnitude the smallest exponent with which it is at most 448, int64."""
    mantissas, exponents = torch.frexp(largest)  # 448 is 0.875 * 2**9
    return (exponents - 9 + (mantissas > 0.875)).clamp_(_LEAST, _MOST).to(torch.int64)


@cache
def _powers(dtype: torch.dtype, extra_exponent: int, sign: int) -> Tensor:
    """Return 2 ** (extra_exponent + sign * exponent) for each exponent from _LEAST on."""
    exponents = range(_LEAST, _MOST + 1)
    return torch.tensor([2.0 ** (extra_exponent + sign * each) for each in exponents], dtype=dtype)


def _layout(dtype: torch.dtype) -> tuple[int, int, torch.dtype]:
    """Return the bits of a mantissa, the difference of the exponents' biases to float8's, and the
    integer type of the same size."""
    if dtype is torch.float16:
        return 10, 15 - 7, torch.int16
    if dtype is torch.bfloat16:
        return 7, 127 - 7, torch.int16
    return 23, 127 - 7, torch.int32
