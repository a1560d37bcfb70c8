# SPDX-License-Identifier: Apache-2.0
"""Waiting for entries of the host cache, at little cost."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from ecshare.store.hostcache.cache import HostCache
from ecshare.store.keys import Key
from ecshare.transfer.announced.host_watch import HostWatch

LONG_S = 30.0
LIMIT_BYTES = 1 << 24


def key(number: int) -> Key:
    return Key(f"ec/2/{'0' * 32}/aa/{number:064x}")


def publish(host: HostCache, number: int) -> None:
    entry = host.publish(key(number), b"an object")
    assert entry is not None
    entry.close()


class CountingCache(HostCache):
    num_asked = 0

    def has(self, key: Key) -> bool:
        self.num_asked += 1
        return super().has(key)


@pytest.fixture
def host(tmp_path: Path) -> CountingCache:
    return CountingCache(tmp_path / "host", LIMIT_BYTES)


def test_entry_published_by_another_process_is_seen(host: HostCache) -> None:
    async def play() -> list[bool]:
        watch = HostWatch(host)
        waiting = [asyncio.create_task(watch.appears(key(number), LONG_S)) for number in range(3)]
        for number in (2, 0, 1):
            publish(HostCache(host.root, LIMIT_BYTES), number)
            assert await waiting[number]
        return [await watch.appears(key(number), LONG_S) for number in range(3)]

    assert asyncio.run(play()) == [True, True, True]


def test_wait_for_a_missing_entry_ends_at_its_timeout(host: HostCache) -> None:
    assert not asyncio.run(HostWatch(host).appears(key(1), 0.02))


def test_waiters_do_not_check_entries_while_the_folder_is_unchanged(host: CountingCache) -> None:
    async def play() -> None:
        watch = HostWatch(host)
        os.utime(host.root, ns=(10**9, 10**9))
        await asyncio.gather(*(watch.appears(key(number), 0.3) for number in range(100)))

    asyncio.run(play())
    assert host.num_asked == 200, (
        "each checks at its start, and all at the first check of the folder"
    )


def test_two_changes_with_the_same_folder_time_are_seen(host: HostCache) -> None:
    """A file system's time advances only every few milliseconds."""
    later_ns = time.time_ns() + 10**12

    async def play() -> None:
        watch = HostWatch(host)
        for number in range(2):
            waiting = asyncio.create_task(watch.appears(key(number), LONG_S))
            await asyncio.sleep(0)
            publish(host, number)
            os.utime(host.root, ns=(later_ns, later_ns))
            assert await waiting

    asyncio.run(play())


def test_cancelled_last_waiter_leaves_no_task(host: HostCache) -> None:
    async def play() -> int:
        watch = HostWatch(host)
        waiting = asyncio.create_task(watch.appears(key(1), LONG_S))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(play()) == 1
