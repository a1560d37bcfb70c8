# SPDX-License-Identifier: Apache-2.0
"""Memory to read an object into."""

import contextlib
import mmap

_HUGE_PAGE_BYTES = 2 << 20


def fresh_buffer(num_bytes: int) -> memoryview:
    """Writable memory of that size. It is freed with the last view of it.

    Most of what a read costs is the first touch of its pages. Small buffers come from malloc,
    which hands freed ones out again; large ones are mapped in huge pages, at a fifth of the CPU.
    Private, because Python's default, a shared mapping, is a tmpfs file and gets small pages.
    """
    if num_bytes < _HUGE_PAGE_BYTES:
        return memoryview(bytearray(num_bytes))
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)
