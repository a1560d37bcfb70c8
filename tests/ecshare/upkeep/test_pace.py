# SPDX-License-Identifier: Apache-2.0
"""Long work leaves the process's time to others."""

import asyncio
import time
from pathlib import Path

import pytest

from ecshare.store.folder.store import DirectoryStore
from ecshare.upkeep.notes import Pace


def test_pause_is_a_multiple_of_the_cpu_time_of_all_threads_of_a_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kv").mkdir()
    for number in range(300):
        (tmp_path / "kv" / str(number)).touch()
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def listed() -> tuple[float, float]:
        store = DirectoryStore(str(tmp_path))
        begun_s = time.thread_time()
        pace = Pace(store, 9.0)
        assert len([each async for each in store.list("")]) == 300
        await pace()
        used_s = time.thread_time() - begun_s
        await pace()
        await store.close()
        return used_s, store.listing_s

    monkeypatch.setattr(asyncio, "sleep", sleep)
    own_s, in_threads_s = asyncio.run(listed())
    first, second = pauses
    assert in_threads_s > 0
    assert 9 * in_threads_s < first <= 9 * (in_threads_s + own_s) + 1e-9
    assert second < first, "a part counts twice"
