# SPDX-License-Identifier: Apache-2.0
"""An engine follows the epoch of its model at stores that refuse, hang and answer late."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.epochs import key_of
from ecshare.store.keys import PROBE_KEY, Kind, namespace_digest
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.upkeep import epochs
from ecshare.transfer.upkeep.renewal import Record
from tests.bad_s3.faults import modes
from tests.bad_s3.server import BUCKET, BadS3, Reply, Request, Stored, bad_s3, refused
from tests.waiting import wait_until

FACTS = {"model": "qwen", "weights": "aa"}
RECORD = Record(Kind.KV, namespace_digest(FACTS), FACTS)
KEY = str(key_of("qwen", None))


@pytest.fixture(autouse=True)
def read_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "READ_EVERY_S", 0.02)
    monkeypatch.setattr(epochs, "_RETRY_S", 0.02)


@pytest.fixture
def server() -> Iterator[BadS3]:
    with bad_s3() as server:
        yield server


@pytest.fixture
def start(server: BadS3, tmp_path: Path) -> Iterator[Callable[[], TransferEngine]]:
    started: list[TransferEngine] = []

    def start(*, write: bool = False) -> TransferEngine:
        config = StoreConfig(
            url=f"s3://{BUCKET}",
            storage_options=server.storage_options,
            host_cache_dir=f"{tmp_path}/host-{len(started)}",
            io_timeout_s=0.5,
        )
        engine = TransferEngine(config, "options")
        started.append(engine)
        engine.start_up(RECORD, write=write, live=True)
        return engine

    yield start
    for engine in started:
        engine.close()


def begin(server: BadS3, number: int) -> None:
    server.objects[KEY] = Stored.of(b"ecshare epoch 1\n%d\n" % number)


def shares(engine: TransferEngine) -> bool:
    """Do what a scheduler does in each step."""
    engine.epochs.advance(lambda: None, lambda record: engine.move(record, write=False))
    return engine.epochs.may_share


def test_engine_that_may_not_list_hears_of_an_epoch(
    server: BadS3, start: Callable[[], TransferEngine]
) -> None:
    """S3 answers it 403 where there is no object."""
    server.objects[PROBE_KEY] = Stored.of(b"ecshare")
    server.faults = {"get": _forbidden_if_absent}
    engine = start()
    server.wait_hit()
    assert engine.epochs.reset()
    wait_until(lambda: shares(engine))
    begin(server, 1)
    wait_until(lambda: not shares(engine))


def _forbidden_if_absent(request: Request) -> Reply | None:
    return refused(403, "AccessDenied") if request.stored is None else None


@pytest.mark.parametrize("fault", ["get:403", "get:503", "any:hang", "get:reset"])
def test_nothing_is_shared_after_a_reset_while_the_store_does_not_answer(
    server: BadS3, start: Callable[[], TransferEngine], fault: str
) -> None:
    """It may have an epoch by now. As with credentials that have expired."""
    engine = start()
    assert shares(engine)
    server.faults = modes(fault)
    engine.epochs.reset()
    with pytest.raises(AssertionError):
        wait_until(lambda: shares(engine), 0.7)
    server.faults = {}
    wait_until(lambda: shares(engine))


def test_store_that_answers_with_older_epochs_changes_nothing(
    server: BadS3, start: Callable[[], TransferEngine]
) -> None:
    engine = start()
    begin(server, 7)
    wait_until(lambda: not shares(engine))
    begin(server, 6)
    engine.epochs.reset()
    wait_until(lambda: shares(engine))
    assert engine.epochs._number == 7
    begin(server, 7)
    engine.epochs.reset()
    wait_until(lambda: shares(engine))


def test_epoch_that_is_read_together_with_the_answer_counts(
    server: BadS3, start: Callable[[], TransferEngine]
) -> None:
    """The answer to a reset may come between two lines of `advance`."""
    engine = start()
    reader = engine.epochs._reader
    assert reader is not None
    has_answered = reader.has_answered

    def answers_now(question: int) -> bool:
        if threading.current_thread() is threading.main_thread():
            begin(server, 9)
            # The reader's thread sets one after the other.
            wait_until(lambda: reader.number == 9 and has_answered(question))
        return has_answered(question)

    engine.epochs.reset()
    reader.has_answered = answers_now  # type: ignore[method-assign]
    moved: list[Record] = []
    engine.epochs.advance(lambda: None, moved.append)
    assert engine.epochs.may_share
    assert moved == [RECORD.in_epoch(9)]


@pytest.fixture
def seen(server: BadS3) -> list[str]:
    """The verbs of all requests for epochs."""
    seen: list[str] = []

    def note(request: Request) -> None:
        if "epochs" in request.path:
            seen.append(request.verb)

    server.faults = {"any": note}
    return seen


def test_engine_reads_one_object_and_lists_nothing_for_it(
    start: Callable[[], TransferEngine], seen: list[str]
) -> None:
    start()
    wait_until(lambda: len(seen) > 5)
    assert set(seen) == {"get"}


def test_engines_that_save_write_a_lost_epoch_again(
    server: BadS3, start: Callable[..., TransferEngine], seen: list[str]
) -> None:
    begin(server, 7)
    start(write=True)
    wait_until(lambda: "put" in seen)
    for _ in range(2):
        del server.objects[KEY]
        wait_until(lambda: KEY in server.objects)
    assert server.objects[KEY].body == b"ecshare epoch 1\n7\n"
    assert seen.count("put") <= 4, "it writes what is there only every few hours"


def test_engines_that_only_read_write_no_epoch(
    server: BadS3, start: Callable[..., TransferEngine], seen: list[str]
) -> None:
    begin(server, 7)
    start()
    wait_until(lambda: len(seen) > 2)
    del server.objects[KEY]
    wait_until(lambda: len(seen) > 8)
    assert set(seen) == {"get"}
