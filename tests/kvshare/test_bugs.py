# SPDX-License-Identifier: Apache-2.0
"""A hook of the connector raises: every request still ends with the right tokens."""

import logging
import threading
import time
from typing import Any

import pytest

from kvshare.scheduler.scheduler import KVScheduler
from kvshare.worker.blocks import BlockCaches
from kvshare.worker.worker import KVWorker
from lab.vllm_loop import RUNNERS, RunnerName
from tests.bugs import fails_from
from tests.kvshare.conftest import StartEngine, sleep_and_wake, spin, worker_connector
from tests.kvshare.gated import GatedFileSystem
from tests.kvshare.toy import BLOCK, GIVE_UP_S, ToyEngine, expected_answer, make_request, serve
from tests.nightly import gate_tries

PROMPTS = [[number, *range(5 * BLOCK + 2)] for number in range(3)]
NUM_TOKENS = 6
SCHEDULER_HOOKS = (
    "num_loadable_tokens",
    "allocated",
    "hit_sources",
    "orders",
    "reported",
    "finished",
    "take_events",
    "take_stats",
    "close",
)
WORKER_HOOKS = (
    "save_leaving",
    "register",
    "load",
    "save",
    "wait_idle",
    "settle",
    "report",
    "take_stats",
    "close",
)
HALVES: list[tuple[type, str]] = [(KVScheduler, name) for name in SCHEDULER_HOOKS]
HALVES += [(KVWorker, name) for name in WORKER_HOOKS]


def serve_all(engine: ToyEngine, name: str) -> None:
    """Serve all prompts together, as vLLM would; check their tokens."""
    for number, prompt in enumerate(PROMPTS):
        engine.add(make_request(f"{name}{number}", prompt, NUM_TOKENS))
    deadline_s = time.monotonic() + GIVE_UP_S
    while engine.has_work:
        engine.step()
        assert time.monotonic() < deadline_s, "the engine hangs"
    for number, prompt in enumerate(PROMPTS):
        answer = engine.answers[f"{name}{number}"]
        assert answer.tokens == expected_answer(prompt, NUM_TOKENS)
    assert engine.scheduler.kv_cache_manager.block_pool.get_usage() == 0.0
    assert not engine.scheduler.requests


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("nth_call", gate_tries(1, 2, 5))
@pytest.mark.parametrize(("half", "hook"), HALVES)
def test_requests_get_right_tokens_although_a_hook_raises(
    start: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    half: type,
    hook: str,
    nth_call: int,
    runner: RunnerName,
) -> None:
    serve_all(start(), "stored")
    monkeypatch.setattr(half, hook, fails_from(getattr(half, hook), nth_call))
    engine = start(runner=runner, is_async=runner == "v2")
    serve_all(engine, "first")
    serve_all(engine, "second")


@pytest.mark.parametrize("hook", ["orders", "settle"])
def test_exception_in_a_hook_is_logged_once_and_counted(
    start: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hook: str,
) -> None:
    half, name = (KVScheduler, "scheduler") if hook == "orders" else (KVWorker, "worker")
    monkeypatch.setattr(half, hook, fails_from(getattr(half, hook), 2))
    engine = start()
    serve_all(engine, "r")
    serve_all(engine, "s")
    assert engine.counts[f"gave_up/{name}"] == 1
    errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert [bool(each.exc_info) for each in errors] == [True]


def test_scheduler_half_stops_once_the_worker_gave_up(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(start(), PROMPTS[0])
    monkeypatch.setattr(KVWorker, "save", fails_from(KVWorker.save, 1))
    engine = start()
    serve_all(engine, "first")
    engine.counts.clear()
    serve_all(engine, "second")
    assert "tokens/queried" not in engine.counts
    assert engine.answers["second0"].kv_transfer_params is None


def test_blocks_still_being_written_are_not_computed_in(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(start(), PROMPTS[0])
    write, begun, may_end = BlockCaches.write, threading.Event(), threading.Event()
    num_written = 0

    def slow(*args: Any) -> None:
        nonlocal num_written
        begun.set()
        assert may_end.wait(GIVE_UP_S)
        num_written += 1
        write(*args)

    monkeypatch.setattr(BlockCaches, "write", slow)
    engine = start()
    engine.add(make_request("r", PROMPTS[0], NUM_TOKENS))
    spin(engine, begun.is_set, "no load begins")
    monkeypatch.setattr(KVWorker, "settle", fails_from(KVWorker.settle, 1))
    for _ in range(20):
        engine.step()
    assert engine.answers["r"].computed_prompt_tokens == 0
    may_end.set()
    spin(engine, lambda: not engine.has_work, "it has not come to rest")
    assert engine.answers["r"].tokens == expected_answer(PROMPTS[0], NUM_TOKENS)
    assert engine.answers["r"].computed_prompt_tokens == len(PROMPTS[0])


def raises(*args: Any) -> None:
    raise RuntimeError("a bug")


@pytest.mark.parametrize("hook", ["unregister", "settle"])
def test_unregister_waits_while_a_block_is_written(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    serve(start(), PROMPTS[0])
    write, begun, may_end = BlockCaches.write, threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        begun.set()
        assert may_end.wait(GIVE_UP_S)
        write(*args)

    monkeypatch.setattr(BlockCaches, "write", slow)
    engine = start()
    engine.add(make_request("r", PROMPTS[0], NUM_TOKENS))
    spin(engine, begun.is_set, "no block is written")
    monkeypatch.setattr(KVWorker, hook, raises)
    engine.step()
    sleeping = threading.Thread(target=worker_connector(engine).unregister_kv_caches)
    sleeping.start()
    sleeping.join(0.05)  # sound code waits however long this takes
    assert sleeping.is_alive()
    may_end.set()
    sleeping.join(GIVE_UP_S)
    assert not sleeping.is_alive()
    spin(engine, lambda: not engine.has_work, "the request does not end")
    assert engine.answers["r"].tokens == expected_answer(PROMPTS[0], NUM_TOKENS)


@pytest.mark.parametrize("nth_call", gate_tries(1, 2))
@pytest.mark.parametrize("hook", ["unregister", "restore"])
def test_engine_sleeps_and_serves_although_sleep_hooks_raise(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch, hook: str, nth_call: int
) -> None:
    monkeypatch.setattr(KVWorker, hook, fails_from(getattr(KVWorker, hook), nth_call))
    engine = start()
    for name in ("first", "second", "third"):
        serve_all(engine, name)
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        sleep_and_wake(engine)


def test_fetch_that_ends_after_the_worker_gave_up_is_not_written(
    gated: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(gated(), PROMPTS[0])
    engine = gated("kv_consumer", engine={"num_blocks": 10})
    GatedFileSystem.close_gate("get")
    engine.add(make_request("r", PROMPTS[0], NUM_TOKENS))
    pool = engine.scheduler.kv_cache_manager.block_pool
    spin(engine, lambda: pool.get_usage() > 0, "no load is ordered")
    monkeypatch.setattr(KVWorker, "settle", fails_from(KVWorker.settle, 1))
    spin(engine, lambda: not engine.has_work, "it has not come to rest")
    assert engine.answers["r"].tokens == expected_answer(PROMPTS[0], NUM_TOKENS)
    others = PROMPTS[0][::-1]
    engine.add(make_request("in the same blocks", others, NUM_TOKENS))
    spin(engine, lambda: bool(engine.answers["in the same blocks"].tokens), "no answer")
    GatedFileSystem.open_gates()
    engine.transfer.drain(GIVE_UP_S)
    spin(engine, lambda: not engine.has_work, "it has not come to rest")
    tokens = engine.answers["in the same blocks"].tokens
    assert tokens == expected_answer(others, NUM_TOKENS)
