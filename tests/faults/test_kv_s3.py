# SPDX-License-Identifier: Apache-2.0
"""An S3 server, or what is between it and the engines, fails while KV is shared."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from lab.faults.http_proxy import FaultProxy
from lab.faults.kinds import Fault
from lab.servers.processes import LOOPBACK
from lab.servers.s3 import SeaweedFS
from tests.conftest import LOGS, StartEngine
from tests.faults.failing import FAULTS, MIDDLE, READABLE, Bucket
from tests.faults.fleet import Decoding
from tests.faults.kv_fleet import KVFleet, sharing

pytestmark = pytest.mark.faults

OBJECTS = "/kv/"
# Saves wait longer than loads: SeaweedFS was seen to need 0.7 s for a PUT while the disk was busy,
# and to pause for a second where it makes volumes. That must not look like what was asked for.
PATIENT = {"io_timeout_s": 3.0}
FLIPPED = "bits flipped in uploads"
WRITABLE = [*(name for name, (_, on) in FAULTS.items() if on == "GET"), "a little slow"]


@dataclass(kw_only=True)
class S3Fleet(Bucket, KVFleet):
    """Engines that reach `server` through `proxy`."""

    def num_stored(self) -> int:
        return len(self.client().find(f"{self.server.url}/kv"))


@pytest.fixture(scope="module")
def fleet(engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Fleet]:
    hosts = tmp_path_factory.mktemp("hosts")
    with (
        SeaweedFS(LOGS, "seaweedfs-kv-faults") as server,
        FaultProxy(LOOPBACK, server.port.number) as proxy,
    ):
        storage = server.storage_options | {"endpoint_url": proxy.url}

        def start(name: str, **options: Any) -> tuple[str, ...]:
            return sharing(server.url, str(hosts / name), storage_options=storage, **options)

        fleet = S3Fleet(
            plain=engine("plain"),
            first=engine("first", *start("first", **PATIENT)),
            consumer=engine("consumer", *start("consumer")),
            server=server,
            proxy=proxy,
        )
        yield fleet.wait_ready()


@pytest.fixture(autouse=True)
def healed(fleet: S3Fleet) -> Iterator[None]:
    """Whatever became of the last case, the next one begins with nothing failing."""
    yield
    fleet.proxy.heal()


@pytest.mark.parametrize("name", [name for name in FAULTS if name != FLIPPED])
def test_what_the_proxy_does_costs_hits_and_no_more(fleet: S3Fleet, name: str) -> None:
    fleet.survive(partial(fleet.fault, name), reads=name in READABLE, writes=name in WRITABLE)


def test_what_was_flipped_on_its_way_in_is_a_miss(fleet: S3Fleet) -> None:
    with Decoding(fleet), fleet.biting(reads=False):
        with fleet.fault(FLIPPED):
            met = fleet.prefill()
            assert not fleet.is_loaded(met)
        fleet.check_recovers()


def test_refused_connections_cost_hits_and_no_more(fleet: S3Fleet) -> None:
    fleet.survive(fleet.refusing)


def test_a_stopped_server_costs_hits_and_no_more(fleet: S3Fleet) -> None:
    fleet.survive(fleet.stopped)


def test_a_bucket_may_be_deleted_and_made_again(fleet: S3Fleet) -> None:
    fleet.survive(fleet.deleted, writes=None)  # SeaweedFS makes it for who uploads


def test_a_server_killed_in_the_middle_of_an_upload(fleet: S3Fleet) -> None:
    with Decoding(fleet), fleet.biting(reads=False, writes=False):
        hits = fleet.proxy.num_hits
        fleet.proxy.fail(Fault.stall(MIDDLE, "upload"), on="PUT", key=OBJECTS)
        lost, met = fleet.prefill(), fleet.prefill()
        fleet.proxy.wait_hit(hits + 1, 60)
        with fleet.down():
            assert not fleet.is_loaded(met)
            fleet.decode(fleet.prefill())
        fleet.check_recovers(lost)


def test_a_server_killed_in_the_middle_of_a_download(fleet: S3Fleet) -> None:
    kept = fleet.store()
    with Decoding(fleet), fleet.biting(reads=False), ThreadPoolExecutor() as asking:
        hits = fleet.proxy.num_hits
        fleet.proxy.fail(Fault.stall(MIDDLE), on="GET", key=OBJECTS)
        loading = asking.submit(fleet.is_loaded, kept)
        fleet.proxy.wait_hit(hits + 1, 60)
        with fleet.down():
            assert not loading.result()
        fleet.check_recovers()


def test_a_prefiller_killed_before_its_upload_is_done(fleet: S3Fleet) -> None:
    """What it has announced never comes; started again, it stores what its host cache has of it."""
    kept = fleet.store()
    with Decoding(fleet):
        hits = fleet.proxy.num_hits
        fleet.proxy.fail(Fault.stall(MIDDLE, "upload"), on="PUT", key=OBJECTS)
        lost, met = fleet.prefill(), fleet.prefill()
        fleet.proxy.wait_hit(hits + 1, 60)
        fleet.first.kill()
        fleet.proxy.disconnect()
        fleet.proxy.heal()
        assert not fleet.is_loaded(met), "it was never stored"
        assert fleet.is_loaded(kept)
    fleet.first.start()
    fleet.first.wait_ready()
    assert fleet.prefill(kept.prompt) == kept
    fleet.check_recovers(lost)
