# SPDX-License-Identifier: Apache-2.0
import mmap

import pytest

from ecshare.store.buffers import fresh_buffer


@pytest.mark.parametrize("size", [0, 1, 2**21 - 1, 2**21, 2**21 + 1, 5 * 2**21])
def test_fresh_buffer_has_the_asked_size_and_own_memory(size: int) -> None:
    one, two = fresh_buffer(size), fresh_buffer(size)
    assert len(one) == len(two) == size
    assert (one.format, one.ndim, one.readonly) == ("B", 1, False)
    one[:] = b"\xff" * size
    assert bytes(two) == bytes(size)


def test_fresh_buffer_works_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)  # an unknown advice
    assert len(fresh_buffer(5 << 20)) == 5 << 20
