# SPDX-License-Identifier: Apache-2.0
"""Some of the wrong S3 responses that `make test-faults` tries: see tests/faults."""

import logging
from collections.abc import Callable, Iterator

import pytest

from ecshare.transfer.jobs import Outcome
from tests.bad_s3.faults import flipped, half, modes
from tests.faults.bad_stores import ASKED, NO_MD5, World, check_damaged, check_jobs, key_of, world
from tests.nightly import gate_tries_only

MODES = [
    "get:web-page-with-etag",
    "get:half-with-its-etag",
    "get:flipped",
    "get:another",
    "get:503",
    "get:409",
    "put:403",
    "put:exists",
    "put:conflict",
    "put:full",
]
# Damage that the checksum finds, another object, a refusal, and a duplicate save.
GATE = ("get:flipped", "get:another", "put:403", "put:exists")


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world("obstore", tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.mark.parametrize("mode", gate_tries_only(GATE, MODES))
def test_wrong_s3_responses_cost_only_hits(at: World, mode: str) -> None:
    check_jobs(at, mode)


@pytest.mark.parametrize("status", ["304", "409", "412"])
def test_repeated_conflicts_open_the_breakers(
    at: World, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    at.begin()
    with at.engine() as engine:
        at.start_up(engine)
        at.server.faults = modes(f"get:{status} head:{status} put:{status}")
        for _ in range(2):
            assert not at.load(engine, *ASKED)[Outcome.OK]
            at.save(engine, at.new_name(), at.new_name())
        assert engine.open_breakers == {"read", "write"}
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize("etag", ["", NO_MD5], ids=["its own etag", "an etag that is no md5"])
@pytest.mark.parametrize("damage", [half, flipped])
def test_damaged_object_in_the_store_is_replaced(
    at: World, damage: Callable[[bytes], bytes], etag: str
) -> None:
    check_damaged(at, "medium", damage(at.good[f"cache/{key_of('medium')}"].body), etag)
