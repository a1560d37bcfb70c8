# SPDX-License-Identifier: Apache-2.0
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops

from kvshare.compat import device_copier

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


def test_device_copier_falls_back_to_single_cuda_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[tuple[int, ...]] = []
    runtime: Any = ModuleType("cuda.bindings.runtime")
    runtime.cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)

    def copy(target: int, source: int, size: int, kind: int, stream: int) -> tuple[int]:
        copies.append((source, target, size))
        return (0 if size == 5 else 700,)

    runtime.cudaMemcpyAsync = copy
    bindings: Any = ModuleType("cuda.bindings")
    bindings.runtime = runtime
    monkeypatch.delattr(_custom_ops, "swap_blocks_batch")
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0), raising=False
    )
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    copier = device_copier()
    assert copier is not None
    with pytest.raises(RuntimeError, match="700"):
        copier(*ADDRESSES)
    assert copies == [(1, 3, 5), (2, 4, 6)]


def test_device_copier_is_none_without_vllms_call_and_cuda_bindings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(_custom_ops, "swap_blocks_batch")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert device_copier() is None
