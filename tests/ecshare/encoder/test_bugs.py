# SPDX-License-Identifier: Apache-2.0
"""A hook of the connector raises: requests with pixels are still answered rightly."""

import logging
from pathlib import Path
from typing import Any

import pytest

from ecshare.connector import ECShareConnector
from ecshare.encoder.messages import Orders
from ecshare.encoder.scheduler.scheduler import EncoderScheduler
from ecshare.encoder.worker import EncoderWorker
from lab import conformance
from lab.conformance.engine import Engine, Ticket
from lab.conformance.harness import Place
from lab.conformance.pictures import picture
from lab.vllm_loop import RUNNERS, RunnerName
from tests.bugs import fails_from
from tests.nightly import gate_tries

OPTIONS = {"url": "{folder}", "host_cache_dir": "{host}", "wait_s": 1}
SCHEDULER_HOOKS = (
    "ready",
    "has",
    "allocated",
    "orders",
    "finished",
    "take_unavailable",
    "reported",
    "take_stats",
    "close",
)
WORKER_HOOKS = ("begin_saves", "load", "save", "settle", "report", "close")
HALVES: list[tuple[type, str]] = [(EncoderScheduler, name) for name in SCHEDULER_HOOKS]
HALVES += [(EncoderWorker, name) for name in WORKER_HOOKS]


@pytest.fixture(scope="module")
def subject(vlm: Path) -> conformance.Subject:
    return conformance.Subject("ecshare.connector", "ECShareConnector", OPTIONS, vlm, patience_s=60)


def connector_of(engine: Engine) -> ECShareConnector:
    connector = engine.scheduler.get_ec_connector()
    assert isinstance(connector, ECShareConnector)
    return connector


def must_end(with_pixels: list[Ticket], without: list[Ticket]) -> None:
    """Check that requests with pixels were answered; those without may fail and be retried."""
    assert all(ticket.is_ok for ticket in with_pixels)
    assert all(ticket.is_ok or ticket.is_failed for ticket in without)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("nth_call", gate_tries(1, 2, 4))
@pytest.mark.parametrize(("half", "hook"), HALVES)
def test_requests_get_right_embeddings_although_a_hook_raises(
    subject: conformance.Subject,
    monkeypatch: pytest.MonkeyPatch,
    half: type,
    hook: str,
    nth_call: int,
    runner: RunnerName,
) -> None:
    with Place(subject, runner, "apart") as place:
        encoded = place.encoder().ask(picture(1), picture(2), picture(3))
        assert encoded.is_ok
        monkeypatch.setattr(half, hook, fails_from(getattr(half, hook), nth_call))
        engine = place.engine("ec_both", "both")
        for _ in range(2):
            without = [
                engine.submit(picture(1).without_pixels(), params=encoded.params),
                engine.submit(
                    picture(2), picture(1).without_pixels(), picture(4), params=encoded.params
                ),
            ]
            full = [
                engine.submit(picture(1), picture(3), params=encoded.params),
                engine.submit(picture(4), picture(2)),
            ]
            engine.wait(*full, *without)
            must_end(full, without)
            engine.idle()
        assert engine.ask(picture(5)).is_ok


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("half", "hook"), HALVES)
def test_encoder_engine_goes_on_although_a_hook_raises(
    subject: conformance.Subject,
    monkeypatch: pytest.MonkeyPatch,
    half: type,
    hook: str,
    runner: RunnerName,
) -> None:
    with Place(subject, runner, "apart") as place:
        monkeypatch.setattr(half, hook, fails_from(getattr(half, hook), 1))
        encoder = place.encoder()
        for seed in (1, 2, 1):
            assert encoder.ask(picture(seed), picture(seed + 10)).is_ok


@pytest.mark.parametrize("hook", ["orders", "load"])
def test_exception_in_a_hook_is_logged_once_and_counted(
    subject: conformance.Subject,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hook: str,
) -> None:
    half, name = (EncoderScheduler, "scheduler") if hook == "orders" else (EncoderWorker, "worker")
    with Place(subject, "v1", "apart") as place:
        monkeypatch.setattr(half, hook, fails_from(getattr(half, hook), 1))
        engine = place.decoder()
        counts: dict[str, float] = {}
        take_stats = connector_of(engine).scheduler.take_stats

        def kept() -> Any:
            stats = take_stats()
            counts.update(stats.data if stats else {})
            return stats

        monkeypatch.setattr(connector_of(engine).scheduler, "take_stats", kept)
        for seed in (1, 2, 3):
            assert engine.ask(picture(seed)).is_ok
    assert counts[f"gave_up/{name}"] == 1
    errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert [bool(each.exc_info) for each in errors] == [True]


def load_nothing(worker: EncoderWorker, orders: Orders, encoder_cache: Any) -> None:
    if orders.loads:
        raise RuntimeError("a bug")


@pytest.mark.parametrize("runner", RUNNERS)
def test_no_item_is_promised_once_the_worker_gave_up(
    subject: conformance.Subject, monkeypatch: pytest.MonkeyPatch, runner: RunnerName
) -> None:
    with Place(subject, runner, "apart") as place:
        encoded = place.encoder().ask(picture(1), picture(2))
        monkeypatch.setattr(EncoderWorker, "load", load_nothing)
        engine = place.decoder()
        assert engine.ask(picture(1), params=encoded.params).is_ok
        assert engine.ask(picture(2), params=encoded.params).is_ok
        assert engine.encoded == ["picture-2"], "the first was promised, and loaded"
