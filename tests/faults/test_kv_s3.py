# SPDX-License-Identifier: Apache-2.0
"""An S3 server, or the proxy before it, fails while KV is shared."""

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
# and to pause for a second when it creates volumes. That must not count as the case's fault.
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
    """Remove the faults after each case, even a failed one."""
    yield
    fleet.proxy.heal()


@pytest.mark.parametrize("name", [name for name in FAULTS if name != FLIPPED])
def test_proxy_fault_costs_only_hits(fleet: S3Fleet, name: str) -> None:
    fleet.survive(partial(fleet.fault, name), reads=name in READABLE, writes=name in WRITABLE)


def test_kv_damaged_during_its_upload_is_a_miss(fleet: S3Fleet) -> None:
    with Decoding(fleet), fleet.counting_failures(reads=False):
        with fleet.fault(FLIPPED):
            met = fleet.prefill()
            assert not fleet.is_loaded(met)
        fleet.check_recovers()


def test_refused_connections_cost_only_hits(fleet: S3Fleet) -> None:
    fleet.survive(fleet.refusing)


def test_stopped_server_costs_only_hits(fleet: S3Fleet) -> None:
    fleet.survive(fleet.stopped)


def test_deleted_bucket_costs_only_hits(fleet: S3Fleet) -> None:
    fleet.survive(fleet.deleted, writes=None)  # an upload makes SeaweedFS create it


def test_server_killed_during_an_upload_costs_only_hits(fleet: S3Fleet) -> None:
    with Decoding(fleet), fleet.counting_failures(reads=False, writes=False):
        hits = fleet.proxy.num_hits
        fleet.proxy.fail(Fault.stall(MIDDLE, "upload"), on="PUT", key=OBJECTS)
        lost, met = fleet.prefill(), fleet.prefill()
        fleet.proxy.wait_hit(hits + 1, 60)
        with fleet.down():
            assert not fleet.is_loaded(met)
            fleet.decode(fleet.prefill())
        fleet.check_recovers(lost)


def test_server_killed_during_a_download_costs_only_hits(fleet: S3Fleet) -> None:
    kept = fleet.store()
    with Decoding(fleet), fleet.counting_failures(reads=False), ThreadPoolExecutor() as asking:
        hits = fleet.proxy.num_hits
        fleet.proxy.fail(Fault.stall(MIDDLE), on="GET", key=OBJECTS)
        loading = asking.submit(fleet.is_loaded, kept)
        fleet.proxy.wait_hit(hits + 1, 60)
        with fleet.down():
            assert not loading.result()
        fleet.check_recovers()


def test_prefiller_killed_during_an_upload_stores_again_after_restart(fleet: S3Fleet) -> None:
    """Its announced KV never arrives; started again, it stores the KV in its host cache."""
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
