# SPDX-License-Identifier: Apache-2.0
"""An S3 server fails while requests run."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import pytest

from lab.servers.engines import EngineProcess, ec_argument
from tests.bad_s3.faults import on
from tests.bad_s3.server import BUCKET, bad_s3
from tests.conftest import StartEngine
from tests.faults.clock import Clock
from tests.faults.failing import FAULTS, READABLE, STALLED, STALLED_UPLOAD, UPLOADS, Bucket, Failing
from tests.faults.fleet import SHORT_WAITS, Decoding, Fleet, Item, new_uuid

pytestmark = pytest.mark.faults

OBJECTS = "/ec/"


@dataclass(kw_only=True)
class S3Fleet(Bucket, Fleet):
    """Engines of one S3 server; `encoder` answers before its upload is done."""

    durable: EngineProcess
    """An encoder that answers after its upload is done."""
    clock: Clock | None
    """The clock of the engines, not of the server. None: it cannot be moved."""

    def store(self) -> Item:
        return replace(self, encoder=self.durable).encode()


@pytest.fixture(scope="module")
def fleet(engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Fleet]:
    hosts = tmp_path_factory.mktemp("hosts")
    clock = None
    with contextlib.suppress(FileNotFoundError):
        clock = Clock(tmp_path_factory.mktemp("clock"))
    clocked = partial(engine, environment=clock.environment if clock else {})
    with bad_s3() as server:

        def argument(role: str, save: str = "announced") -> str:
            return ec_argument(
                role,
                f"s3://{BUCKET}/cache",
                storage_options=server.storage_options,
                host_cache_dir=str(hosts / role),
                save=save,
                **SHORT_WAITS,
            )

        durable = clocked("durable", argument("producer", "durable"))
        fleet = S3Fleet(
            engine("plain"),
            clocked("encoder", argument("producer")),
            clocked("consumer", argument("consumer"), "--enable-mm-embeds"),
            durable=durable,
            server=server,
            clock=clock,
        )
        fleet.wait_ready()
        durable.wait_ready()
        yield fleet


@pytest.fixture(autouse=True)
def healed(fleet: S3Fleet) -> Iterator[None]:
    """Remove the faults after each case, even a failed one."""
    yield
    fleet.server.faults = {}
    if fleet.clock is not None:
        fleet.clock.move(0)


# How far the clock is moved, and whether an S3 server still accepts signatures of that time.
CLOCKS = {"an hour ahead": (3600, False), "an hour behind": (-3600, False),
          "five minutes ahead": (300, True), "five minutes behind": (-300, True)}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_server_fault_costs_only_hits(fleet: S3Fleet, name: str) -> None:
    check_fault(fleet, name)


@pytest.mark.parametrize("name", [*UPLOADS, "503", "silent"])
def test_durable_encoder_answers_during_a_fault(fleet: S3Fleet, name: str) -> None:
    check_fault(replace(fleet, encoder=fleet.durable), name)


def check_fault(fleet: S3Fleet, name: str) -> None:
    survive(fleet, partial(fleet.fault, name), reads=name in READABLE)


def test_refused_connections_cost_only_hits(fleet: S3Fleet) -> None:
    survive(fleet, fleet.server.refusing)


@pytest.mark.parametrize("name", CLOCKS)
def test_moved_clock_costs_only_hits(fleet: S3Fleet, name: str) -> None:
    ahead_s, is_taken = CLOCKS[name]
    clock = fleet.clock
    if clock is None:
        pytest.skip("no C compiler (cc)")

    @contextlib.contextmanager
    def failing() -> Iterator[None]:
        clock.move(ahead_s)
        yield
        clock.move(0)

    survive(fleet, failing, reads=is_taken)


def test_deleted_bucket_costs_only_hits(fleet: S3Fleet) -> None:
    survive(fleet, fleet.deleted)


@pytest.mark.parametrize("save", ["announced", "durable"])
def test_server_killed_during_an_upload_costs_only_hits(fleet: S3Fleet, save: str) -> None:
    if save == "durable":
        fleet = replace(fleet, encoder=fleet.durable)
    with Decoding(fleet), ThreadPoolExecutor() as asking:
        fleet.server.faults = {"put": on(OBJECTS, STALLED_UPLOAD)}
        encoding = asking.submit(fleet.encode)
        fleet.server.wait_hit()
        with fleet.server.refusing():
            lost = encoding.result()
            fleet.check_with_pixels()
            fleet.check_announced(lost)
    fleet.check_recovers(lost)


def test_server_killed_during_a_download_costs_only_hits(fleet: S3Fleet) -> None:
    kept = fleet.store()
    with Decoding(fleet), ThreadPoolExecutor() as asking:
        fleet.server.faults = {"get": on(OBJECTS, STALLED)}
        loading = asking.submit(fleet.without_pixels, kept)
        fleet.server.wait_hit()
        with fleet.server.refusing():
            fleet.is_right(kept, loading.result())
            fleet.check_with_pixels(kept.uuid, kept.seed)
    fleet.check_recovers(kept)


def test_encoder_killed_during_an_upload_costs_only_hits(fleet: S3Fleet) -> None:
    with Decoding(fleet):
        fleet.server.faults = {"put": on(OBJECTS, STALLED_UPLOAD)}
        known = fleet.encode()
        fleet.server.wait_hit()
        fleet.encoder.kill()
        fleet.server.disconnect()
        assert not fleet.is_right(known, fleet.without_pixels(known)), "it was never stored"
        fleet.check_with_pixels(known.uuid, known.seed)
    fleet.encoder.start()
    fleet.encoder.wait_ready()
    fleet.check_recovers(known)


def test_retry_succeeds_after_a_durable_encoder_is_killed(fleet: S3Fleet) -> None:
    """The client gets no answer, and retries on another encoder."""
    uuid, seed = new_uuid()
    with Decoding(fleet), ThreadPoolExecutor() as asking:
        fleet.server.faults = {"put": on(OBJECTS, STALLED_UPLOAD)}
        asked = asking.submit(replace(fleet, encoder=fleet.durable).encode, uuid, seed)
        fleet.server.wait_hit()
        fleet.durable.kill()
        assert isinstance(asked.exception(), OSError)
        fleet.server.disconnect()
        fleet.check_recovers(fleet.encode(uuid, seed))
    fleet.durable.start()
    fleet.durable.wait_ready()
    replace(fleet, encoder=fleet.durable).check_recovers()


def test_consumer_killed_during_a_load_reuses_its_host_cache(fleet: S3Fleet) -> None:
    loaded, loading = fleet.store(), fleet.store()
    assert fleet.is_right(loaded, fleet.without_pixels(loaded))
    with ThreadPoolExecutor() as asking:
        fleet.server.faults = {"get": on(OBJECTS, STALLED)}
        asked = asking.submit(fleet.without_pixels, loading)
        fleet.server.wait_hit()
        fleet.consumer.kill()
        assert isinstance(asked.exception(), OSError)
    fleet.server.faults = {}
    fleet.consumer.start()
    fleet.consumer.wait_ready()
    with fleet.server.refusing():
        assert fleet.is_right(loaded, fleet.without_pixels(loaded)), "it was in the host cache"
    fleet.check_recovers(loading)


def survive(
    fleet: S3Fleet,
    failing: Failing,
    *,
    reads: bool = False,
) -> None:
    """Send all kinds of requests during a fault; `reads`: stored objects can still be read.

    If not, no request may have read one: the fault would have had no effect.
    """
    kept, unread = fleet.store(), fleet.store()
    with Decoding(fleet):
        with failing():
            lost = fleet.encode()
            fleet.check_with_pixels()
            is_right = fleet.is_right(kept, fleet.without_pixels(kept))
            assert is_right is reads, "it was loaded" if is_right else "it was not loaded"
            fleet.check_announced(lost)
            fleet.check_with_pixels(unread.uuid, unread.seed)
            fleet.check_with_pixels(lost.uuid, lost.seed)
        fleet.check_with_pixels()
    fleet.check_recovers(lost)
