# SPDX-License-Identifier: Apache-2.0
"""An S3 server fails while KV is shared."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.bad_s3.faults import on
from tests.bad_s3.server import BUCKET, bad_s3
from tests.conftest import StartEngine
from tests.faults.failing import FAULTS, READABLE, STALLED, STALLED_UPLOAD, Bucket
from tests.faults.fleet import Decoding
from tests.faults.kv_fleet import KVFleet, sharing

pytestmark = pytest.mark.faults

OBJECTS = "/kv/"
# Saves wait longer than loads: a busy machine must not count as the case's fault.
PATIENT = {"io_timeout_s": 3.0}
FLIPPED = "bits flipped in uploads"
WRITABLE = [*(name for name, faults in FAULTS.items() if "get" in faults), "a little slow"]


@dataclass(kw_only=True)
class S3Fleet(Bucket, KVFleet):
    """Engines of one S3 server."""

    def num_stored(self) -> int:
        return sum(OBJECTS in key for key in tuple(self.server.objects))


@pytest.fixture(scope="module")
def fleet(engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Fleet]:
    hosts = tmp_path_factory.mktemp("hosts")
    with bad_s3() as server:

        def start(name: str, **options: Any) -> tuple[str, ...]:
            return sharing(
                f"s3://{BUCKET}/cache",
                str(hosts / name),
                storage_options=server.storage_options,
                **options,
            )

        fleet = S3Fleet(
            plain=engine("plain"),
            first=engine("first", *start("first", **PATIENT)),
            consumer=engine("consumer", *start("consumer")),
            server=server,
        )
        yield fleet.wait_ready()


@pytest.fixture(autouse=True)
def healed(fleet: S3Fleet) -> Iterator[None]:
    """Remove the faults after each case, even a failed one."""
    yield
    fleet.server.faults = {}


@pytest.mark.parametrize("name", [name for name in FAULTS if name != FLIPPED])
def test_server_fault_costs_only_hits(fleet: S3Fleet, name: str) -> None:
    fleet.survive(partial(fleet.fault, name), reads=name in READABLE, writes=name in WRITABLE)


def test_kv_damaged_during_its_upload_is_a_miss(fleet: S3Fleet) -> None:
    with Decoding(fleet), fleet.counting_failures(reads=False):
        with fleet.fault(FLIPPED):
            met = fleet.prefill()
            assert not fleet.is_loaded(met)
        fleet.check_recovers()


def test_refused_connections_cost_only_hits(fleet: S3Fleet) -> None:
    fleet.survive(fleet.server.refusing)


def test_deleted_bucket_costs_only_hits(fleet: S3Fleet) -> None:
    fleet.survive(fleet.deleted)


def test_server_killed_during_an_upload_costs_only_hits(fleet: S3Fleet) -> None:
    with Decoding(fleet), fleet.counting_failures(reads=False, writes=False):
        fleet.server.faults = {"put": on(OBJECTS, STALLED_UPLOAD)}
        lost, met = fleet.prefill(), fleet.prefill()
        fleet.server.wait_hit()
        with fleet.server.refusing():
            assert not fleet.is_loaded(met)
            fleet.decode(fleet.prefill())
        fleet.check_recovers(lost)


def test_server_killed_during_a_download_costs_only_hits(fleet: S3Fleet) -> None:
    kept = fleet.store()
    with Decoding(fleet), fleet.counting_failures(reads=False), ThreadPoolExecutor() as asking:
        fleet.server.faults = {"get": on(OBJECTS, STALLED)}
        loading = asking.submit(fleet.is_loaded, kept)
        fleet.server.wait_hit()
        with fleet.server.refusing():
            assert not loading.result()
        fleet.check_recovers()


def test_prefiller_killed_during_an_upload_stores_again_after_restart(fleet: S3Fleet) -> None:
    """Its announced KV never arrives; started again, it stores the KV in its host cache."""
    kept = fleet.store()
    with Decoding(fleet):
        fleet.server.faults = {"put": on(OBJECTS, STALLED_UPLOAD)}
        lost, met = fleet.prefill(), fleet.prefill()
        fleet.server.wait_hit()
        fleet.first.kill()
        fleet.server.disconnect()
        assert not fleet.is_loaded(met), "it was never stored"
        assert fleet.is_loaded(kept)
    fleet.first.start()
    fleet.first.wait_ready()
    assert fleet.prefill(kept.prompt) == kept
    fleet.check_recovers(lost)
