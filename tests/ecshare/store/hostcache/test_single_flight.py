# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ecshare.store.hostcache.cache import Entry, HostCache
from ecshare.store.hostcache.single_flight import Claim
from ecshare.store.keys import Key, Kind, object_key

KEY, OTHER = (object_key(Kind.EC, "0" * 32, name) for name in ("one", "other"))

HOLDER = """
import sys
from pathlib import Path
from ecshare.store.hostcache.cache import Entry, HostCache
claim = HostCache(Path(sys.argv[1]), 1 << 20).claim(sys.argv[2])
print(claim is not None, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path) -> HostCache:
    return HostCache(tmp_path / "host", 1 << 20)


def test_one_claim_per_key_at_a_time(cache: HostCache) -> None:
    claim = cache.claim(KEY)
    assert claim is not None
    assert cache.claim(KEY) is None
    other = cache.claim(OTHER)
    assert other is not None, "another key is free"
    assert cache.claim(KEY) is None
    claim.release()
    claim.release()
    again = cache.claim(KEY)
    assert again is not None
    again.release()


def test_entry_published_just_before_the_claim_is_opened(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = HostCache.claim

    def claimed_late(self: HostCache, key: Key) -> Claim | None:
        with closing(cache.publish(key, b"whole") or pytest.fail("no room")):
            return claim(self, key)

    monkeypatch.setattr(HostCache, "claim", claimed_late)
    found = cache.open_or_claim(KEY)
    assert isinstance(found, Entry)
    with closing(found):
        assert bytes(found.body) == b"whole"
    monkeypatch.undo()
    assert cache.claim(KEY) is not None, "the claim is released"


def test_garbage_collected_claim_is_released(cache: HostCache) -> None:
    claim = cache.claim(KEY)
    assert claim is not None
    del claim
    assert cache.claim(KEY) is not None


def test_claims_of_different_stores_are_independent(cache: HostCache) -> None:
    other_store = HostCache(cache.root, 1 << 20, "0123456789abcdef")
    claim = cache.claim(KEY)
    assert claim is not None
    assert other_store.claim(KEY) is not None


def test_claim_is_released_when_its_process_dies(cache: HostCache) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(cache.root), KEY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    assert cache.claim(KEY) is None
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert cache.claim(KEY) is not None


def test_released_claim_is_free_despite_a_living_fork(cache: HostCache) -> None:
    claim = cache.claim(KEY)
    assert claim is not None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    claim.release()
    assert cache.claim(KEY) is not None
    os.close(reading)
    os.close(writing)
    os.waitpid(child, 0)


def test_every_process_may_fetch_if_claims_cannot_be_locked(
    cache: HostCache, caplog: pytest.LogCaptureFixture
) -> None:
    (cache.root / ".claims").mkdir()
    for _ in range(2):
        assert cache.claim(KEY) is not None
    assert len(caplog.messages) == 1
