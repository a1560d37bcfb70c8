# SPDX-License-Identifier: Apache-2.0
"""Memory to read an object into."""

import contextlib
import mmap

_HUGE_PAGE_BYTES = 2 << 20


def fresh_buffer(num_bytes: int) -> memoryview:
    """Return writable memory of that size. It is freed with the last view of it.

    Most of the cost of a read is the first access to its pages. Small buffers come from malloc,
    which reuses freed ones. Large ones are mapped with huge pages, which takes a fifth of the CPU
    time. The mapping is private: Python's default, a shared mapping, is a tmpfs file and gets small
    pages.
    """
    if num_bytes < _HUGE_PAGE_BYTES:
        return memoryview(bytearray(num_bytes))
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    prefer_huge_pages(pages)
    return memoryview(pages)


def prefer_huge_pages(memory: mmap.mmap) -> None:
    """Have the kernel back `memory` by huge pages, if it has them. To be called before its use."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
