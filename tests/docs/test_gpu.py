# SPDX-License-Identifier: Apache-2.0
"""The numbers of docs/gpu.md equal those of the code."""

import re

from ecshare.encoder.worker import _LOAD_BYTES
from ecshare.store.config import GIB
from ecshare.store.hostcache import folder
from kvshare.chunks.slabs import slab_sizes
from kvshare.config import KVConfig
from kvshare.worker.worker import _LOAD_BUFFER_BYTES
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "gpu.md").read_text()
BLOCK_TOKENS = 16
MIB = 1 << 20


def test_sizes_equal_those_of_the_save_budget() -> None:
    config = KVConfig(url="/store")
    chunk_blocks = config.chunk_blocks(BLOCK_TOKENS)
    rows = re.findall(
        r"^\| [\w.-]+ \| (\d+) \| (\d+) x (\d+) \| (\d+) \| (\d+) MiB \| (\d+) \| ([\d,]+) \|$",
        PAGE,
        re.M,
    )
    assert len(rows) == 7
    for row in rows:
        numbers = [int(each.replace(",", "")) for each in row]
        layers, heads, size, ranks, mib, count, tokens = numbers
        block_bytes = layers * heads // ranks * 2 * size * BLOCK_TOKENS * 2
        assert block_bytes * chunk_blocks == mib * MIB
        assert config.buffer_bytes // slab_sizes([block_bytes])(0, chunk_blocks) == count
        assert count * chunk_blocks * BLOCK_TOKENS == tokens


def test_sums_of_memory_add_up() -> None:
    config = KVConfig(url="/store")
    for_loads = 8 * _LOAD_BUFFER_BYTES / GIB
    sums = re.findall(r"(\d+) x ([\d.]+) \+ 1 \+ 7 x ([\d.]+) \+ 4 = (\d+) GiB", PAGE)
    assert len(sums) == 2
    for (ranks, each, other, total), buffer_gib in zip(sums, (1, 4), strict=True):
        assert float(each) == round(buffer_gib + for_loads, 2)
        assert float(other) == _LOAD_BYTES / GIB
        assert config.buffer_bytes == GIB
        assert config.host_cache_bytes == 4 * GIB
        exact = int(ranks) * float(each) + 1 + 7 * float(other) + 4
        assert round(exact) == int(total)
    assert f"{_LOAD_BYTES // MIB} MiB, or `buffer_bytes`" in PAGE
    assert f"{8 * _LOAD_BUFFER_BYTES // MIB} MiB, or eight blocks" in PAGE


def test_host_cache_shares_of_the_disk_are_as_documented() -> None:
    assert folder.SHARE == 0.5
    assert folder.FLOOR_BYTES == folder.ENOUGH_BYTES == GIB


def test_page_has_at_most_120_lines() -> None:
    assert len(PAGE.splitlines()) <= 120
