# SPDX-License-Identifier: Apache-2.0
import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops

from kvshare.compat import device_copier

_SIGNATURE = [
    *[ctypes.c_void_p] * 3,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
]
"""Of `cuMemcpyBatchAsync` in CUDA 12.8."""
ADDRESSES = (np.array([1, 2]), np.array([3, 4]), np.array([5, 6]))


def test_device_copier_calls_vllms_batched_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """This release has the call, and it takes tensors of addresses and sizes on the host."""
    taken: list[tuple[torch.Tensor, ...]] = []

    def noted(src_ptrs: Any, dst_ptrs: Any, sizes: Any) -> None:
        taken.append((src_ptrs, dst_ptrs, sizes))

    assert list(_custom_ops.swap_blocks_batch.__annotations__)[:3] == [
        "src_ptrs",
        "dst_ptrs",
        "sizes",
    ]
    monkeypatch.setattr(_custom_ops, "swap_blocks_batch", noted)
    copier = device_copier()
    assert copier is not None
    copier(*ADDRESSES)
    assert [each.tolist() for each in taken[0]] == [[1, 2], [3, 4], [5, 6]]
    assert all(each.dtype == torch.int64 for each in taken[0])


def test_device_copier_falls_back_to_the_drivers_batched_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []

    def batch(*given: Any) -> int:
        targets, sources, sizes, number, attributes, first_copy, num_attributes, _, stream = given
        calls.append(
            (
                *(_values(array, number) for array in (sources, targets, sizes)),
                (ctypes.c_uint32 * 6).from_address(attributes)[:],
                _values(first_copy, num_attributes),
                stream,
            )
        )
        return 700 if len(calls) > 1 else 0

    driver = SimpleNamespace(cuMemcpyBatchAsync=ctypes.CFUNCTYPE(ctypes.c_int, *_SIGNATURE)(batch))
    monkeypatch.delattr(_custom_ops, "swap_blocks_batch")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": driver}[name])
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=8), raising=False
    )
    copier = device_copier()
    assert copier is not None
    copier(*ADDRESSES)
    in_stream_order = [1, 0, 0, 0, 0, 0]
    assert calls == [([1, 2], [3, 4], [5, 6], in_stream_order, [0], 8)]
    with pytest.raises(RuntimeError, match="700"):
        copier(*ADDRESSES)


@pytest.mark.parametrize("driver", [None, SimpleNamespace()], ids=["missing", "old"])
def test_device_copier_is_none_without_vllms_call_and_a_driver_that_has_one(
    monkeypatch: pytest.MonkeyPatch, driver: SimpleNamespace | None
) -> None:
    def load(name: str) -> SimpleNamespace:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.delattr(_custom_ops, "swap_blocks_batch")
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert device_copier() is None


def _values(address: int, number: int) -> list[int]:
    return (ctypes.c_int64 * number).from_address(address)[:]
