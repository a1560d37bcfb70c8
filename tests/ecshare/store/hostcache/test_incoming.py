# SPDX-License-Identifier: Apache-2.0
"""Objects that are being received into the host cache."""

import gc
import os
import threading
from pathlib import Path

import pytest

from ecshare.store.errors import ObjectCorrupt
from ecshare.store.hostcache.cache import Draft, HostCache
from ecshare.store.keys import Key, Kind, object_key

KIB = 1 << 10
LIMIT = 1 << 20
KEYS = [object_key(Kind.EC, "0" * 32, str(n)) for n in range(10)]
KEY = KEYS[0]
BODY = os.urandom(10 * KIB)


@pytest.fixture
def cache(tmp_path: Path) -> HostCache:
    return HostCache(tmp_path / "host", 100 * KIB)


def incoming(cache: HostCache, key: Key = KEY, body: bytes = BODY) -> Draft:
    found = cache.receive(key, LIMIT)
    found.begin(len(body))
    half = len(body) // 2
    found.write(half, body[half:])
    found.write(0, memoryview(body)[:half])
    return found


def names(cache: HostCache) -> list[str]:
    return sorted(
        path.name for path in cache.root.iterdir() if path.name not in (".used", ".evicting")
    )


def tally(cache: HostCache) -> int:
    return int.from_bytes((cache.root / ".used").read_bytes()[:8], "little", signed=True)


def file_of(cache: HostCache, key: Key = KEY) -> Path:
    return cache.root / key.replace("/", "+")


def test_received_object_is_an_entry_once_published(cache: HostCache) -> None:
    received = incoming(cache)
    assert received.body == BODY
    assert received.body.readonly
    assert cache.open(KEY) is None
    entry = received.publish()
    assert entry is not None
    assert entry.body == BODY
    received.discard()
    entry.close()
    opened = cache.open(KEY)
    assert opened is not None
    assert opened.body == BODY
    assert names(cache) == [file_of(cache).name]
    assert tally(cache) == len(BODY)


def test_received_entry_is_pinned(cache: HostCache) -> None:
    received = incoming(cache, body=bytes(90 * KIB))
    assert cache.publish(KEYS[1], bytes(20 * KIB)) is None
    entry = received.publish()
    assert entry is not None
    assert cache.publish(KEYS[1], bytes(20 * KIB)) is None
    entry.close()
    del received
    assert cache.publish(KEYS[1], bytes(20 * KIB)) is not None
    assert cache.open(KEY) is None


def test_discarded_draft_leaves_nothing(cache: HostCache) -> None:
    received = incoming(cache)
    received.discard()
    received.discard()
    assert names(cache) == []
    assert tally(cache) == 0
    with pytest.raises(BrokenPipeError):
        received.write(0, b"late")
    with pytest.raises(BrokenPipeError):
        received.begin(5)
    assert names(cache) == []


def test_garbage_collected_draft_leaves_nothing(cache: HostCache) -> None:
    incoming(cache)
    gc.collect()
    assert names(cache) == []
    assert tally(cache) == 0


@pytest.mark.parametrize("size", [LIMIT + 1, 1 << 62, -1])
def test_size_beyond_the_limit_creates_no_file(cache: HostCache, size: int) -> None:
    received = cache.receive(KEY, LIMIT)
    with pytest.raises(ObjectCorrupt, match=str(size)):
        received.begin(size)
    assert names(cache) == []


def test_incomplete_object_cannot_be_read_or_published(cache: HostCache) -> None:
    received = cache.receive(KEY, LIMIT)
    with pytest.raises(ObjectCorrupt):
        _ = received.body
    received.begin(100)
    received.write(0, bytes(60))
    received.write(70, bytes(30))
    with pytest.raises(ObjectCorrupt, match="10 bytes"):
        _ = received.body
    with pytest.raises(ObjectCorrupt):
        received.publish()
    with pytest.raises(ObjectCorrupt, match="more than the 100"):
        received.write(95, bytes(6))


def test_first_of_two_published_drafts_is_the_entry(cache: HostCache) -> None:
    first, second = incoming(cache), incoming(cache, body=bytes(10 * KIB))
    one = first.publish()
    two = second.publish()
    assert one is not None
    assert two is not None
    assert two.body == BODY
    assert names(cache) == [file_of(cache).name]
    assert tally(cache) == len(BODY)


def test_object_is_received_without_room_but_not_published(cache: HostCache) -> None:
    pin = cache.publish(KEYS[1], bytes(95 * KIB))
    received = incoming(cache)
    assert received.body == BODY
    body = received.body
    assert received.publish() is None
    received.discard()
    assert body == BODY
    assert names(cache) == [file_of(cache, KEYS[1]).name]
    assert pin is not None


def test_view_outlives_draft_and_entry(cache: HostCache) -> None:
    received = incoming(cache)
    body = received.body
    entry = received.publish()
    assert entry is not None
    entry.close()
    cache.discard(KEY)
    del received, entry
    gc.collect()
    assert body == BODY


def test_many_threads_may_write_to_a_draft(cache: HostCache) -> None:
    received = cache.receive(KEY, LIMIT)
    received.begin(64 * KIB)
    body = os.urandom(64 * KIB)

    def write(n: int) -> None:
        for start in range(n * KIB, len(body), 8 * KIB):
            received.write(start, body[start : start + KIB])

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert received.body == body


def test_writes_to_a_private_copy_are_not_shared(cache: HostCache) -> None:
    entry = incoming(cache).publish()
    assert entry is not None
    one, two = entry.copy_on_write(), entry.copy_on_write()
    one[5] ^= 1
    assert one[5] != BODY[5]
    assert one[6:] == BODY[6:]
    assert two == entry.body == BODY
    assert file_of(cache).read_bytes() == BODY
    entry.close()
    cache.discard(KEY)
    one[7] ^= 1
    assert two == BODY
    assert one[8:] == BODY[8:]
