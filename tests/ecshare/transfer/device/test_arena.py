# SPDX-License-Identifier: Apache-2.0
"""Host memory in parts: parts do not overlap, and freed parts are merged."""

import mmap
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecshare.transfer.device.staging import Arena, Staging
from lab.gpu_stand_in import stand_in

PAGE = 4096
CPU = torch.device("cpu")


def test_parts_have_whole_pages_and_first_fit_is_used() -> None:
    arena = Arena(4 * PAGE, CPU)
    one, two, three = (arena.take(size) for size in (1, PAGE + 1, PAGE))
    assert one is not None
    assert two is not None
    assert three is not None
    assert [part.nbytes for part in (one, two, three)] == [PAGE, 2 * PAGE, PAGE]
    assert arena.take(1) is None
    arena.give_back(three)
    arena.give_back(one)
    again = arena.take(1)
    assert again is not None
    assert again.data_ptr() == one.data_ptr()
    assert arena.used_bytes == 3 * PAGE


@given(st.lists(st.tuples(st.integers(1, 5 * PAGE), st.integers(0, 20)), max_size=60))
def test_parts_never_overlap_and_are_merged_again(steps: list[tuple[int, int]]) -> None:
    """Take parts, and sometimes give an earlier one back."""
    arena, taken = Arena(16 * PAGE, CPU), []
    for size, which in steps:
        part = arena.take(size)
        if part is not None:
            assert part.nbytes >= size
            taken.append(part)
        places = sorted((part.data_ptr(), part.nbytes) for part in taken)
        for (start, length), (after, _) in zip(places, places[1:], strict=False):
            assert start + length <= after
        assert arena.used_bytes == sum(part.nbytes for part in taken)
        if which < len(taken):
            arena.give_back(taken.pop(which))
    for part in taken:
        arena.give_back(part)
    assert arena.take(16 * PAGE) is not None, "freed parts are merged"


def test_part_with_a_reader_is_reused_after_the_reader_is_gone() -> None:
    class Reader:
        pass

    arena, reader = Arena(PAGE, CPU), Reader()
    part = arena.take(1)
    assert part is not None
    arena.give_back(part, reader)
    assert arena.take(1) is None
    del reader
    assert arena.take(1) is not None


def test_threads_can_take_and_give_back_concurrently() -> None:
    arena, errors = Arena(64 * PAGE, CPU), list[str]()

    def work(number: int) -> None:
        for _ in range(500):
            part = arena.take(3 * PAGE)
            if part is None:
                continue
            part.fill_(number)
            if not bool((part == number).all()):
                errors.append("two threads have the same part")
            arena.give_back(part)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert arena.used_bytes == 0


def test_too_large_buffer_is_reduced_with_a_warning(caplog: Any) -> None:
    """No host has this much memory."""
    staging = Staging(CPU, 1 << 60)
    assert "buffer_bytes: the host gives" in caplog.text
    assert staging.used_bytes == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_arena_memory_is_not_inherited_by_a_fork() -> None:
    """Otherwise copy-on-write would move a page that a device is copying to."""
    assert "dc" in flags_of_memory(Arena(4 * PAGE, CPU)), "it is inherited by forks"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pinned_memory_has_huge_pages_where_the_kernel_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch)
    assert "hg" in flags_of_memory(Arena(4 * PAGE, CPU))
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)  # an unknown advice
    assert "hg" not in flags_of_memory(Arena(4 * PAGE, CPU))


def flags_of_memory(arena: Arena) -> list[str]:
    """Return the kernel's flags of the memory of `arena`."""
    part = arena.take(PAGE)
    assert part is not None
    maps = Path("/proc/self/smaps").read_text()
    flags = [
        flags.split()
        for first, end, flags in re.findall(
            r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", maps, re.MULTILINE | re.DOTALL
        )
        if int(first, 16) <= part.data_ptr() < int(end, 16)
    ]
    (found,) = flags
    return list(found)
