# SPDX-License-Identifier: Apache-2.0
"""An S3 server that answers wrongly, in every way that a server or a proxy can.

Transfer engines only, without vLLM: by obstore and by s3fs.
"""

from collections.abc import Callable, Iterable, Iterator

import pytest

from ecshare.transfer.jobs import Outcome
from tests.bad_s3.faults import (
    ANY,
    FAULTS,
    empty,
    flipped,
    flipped_in_front,
    half,
    longer,
    modes,
    zeroed,
)
from tests.bad_s3.server import Verb
from tests.faults.bad_stores import (
    NO_MD5,
    ROADS,
    World,
    check_damaged,
    check_jobs,
    check_start,
    key_of,
    world,
)

pytestmark = pytest.mark.faults


def every(verb: Verb, among: Iterable[str] = ()) -> list[str]:
    return [f"{verb}:{name}" for name in among or FAULTS[verb]]


ALL_AT_ONCE = [
    "get:503 head:503 put:503 list:503",
    "get:403 head:403 put:403 list:403 delete:403",
    "get:hang head:hang put:hang list:hang",
    "get:skew head:skew put:skew list:skew",
    "get:304 head:304 put:304 list:304 delete:304",
    "get:409 head:409 put:409 list:409 delete:409",
    "get:412 head:412 put:412 list:412 delete:412",
]
# The engine checks by HEAD whether an object is damaged in the store itself.
BOTH_WAYS = [
    "get:flipped head:missing",
    "get:flipped head:503",
    "get:flipped head:no-etag",
    "get:flipped head:hang",
    "get:half head:everything",
    "get:flipped-with-its-etag head:no-etag",
    "get:another head:no-etag",
]
JOBS = [*every("get"), *every("put"), *every("head"), *ALL_AT_ONCE, *BOTH_WAYS]
STARTS = [*every("get", [*ANY, "web-page", "half", "missing", "endless-head"]),
          *every("put"), *every("list"), *ALL_AT_ONCE]  # fmt: skip
DAMAGE = [half, empty, longer, flipped, flipped_in_front, zeroed]


@pytest.fixture(scope="module", params=ROADS)
def at(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(request.param, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.mark.parametrize("mode", JOBS)
def test_wrong_answers_cost_only_hits(at: World, mode: str) -> None:
    check_jobs(at, mode)


@pytest.mark.parametrize("mode", STARTS)
def test_engine_starts_or_is_refused_in_one_line(at: World, mode: str) -> None:
    check_start(at, mode)


@pytest.mark.parametrize("name", ["small", "medium"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_object_is_not_loaded_and_is_replaced(
    at: World, damage: Callable[[bytes], bytes], name: str
) -> None:
    body = damage(at.good[f"cache/{key_of(name)}"].body)
    check_damaged(at, name, body)


@pytest.mark.parametrize("damage", [half, flipped])
def test_damaged_object_is_replaced_if_etags_are_no_md5(
    at: World, damage: Callable[[bytes], bytes]
) -> None:
    body = damage(at.good[f"cache/{key_of('medium')}"].body)
    check_damaged(at, "medium", body, NO_MD5)


@pytest.mark.parametrize("mode", [*every("delete"), "head:503", "head:missing", "head:hang"])
def test_damaged_object_is_replaced_after_a_failed_removal(at: World, mode: str) -> None:
    check_damaged(at, "medium", flipped(at.good[f"cache/{key_of('medium')}"].body), mode=mode)


def test_torn_upload_is_not_loaded_and_is_replaced(at: World) -> None:
    at.begin()
    name = at.new_name()
    with at.engine() as engine:
        at.start_up(engine)
        at.server.faults = modes("put:torn")
        at.save(engine, name)
        at.server.faults = {}
    with at.engine() as engine:
        assert not at.load(engine, name)[Outcome.OK]
        assert at.save(engine, name)[0].outcome is Outcome.OK
    with at.engine() as engine:
        assert at.load(engine, name)[Outcome.OK]
    at.check_no_good_object_is_deleted()
