# SPDX-License-Identifier: Apache-2.0
"""D has its request while P computes, where there are several of each."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ecshare.router.fleet import models
from tests.ecshare.router.fake_engine import (
    Answer,
    FakeEngine,
    Fleet,
    Held,
    chat,
    decoded,
    failing,
    fleet,
    hang_up,
    prefilled,
)

pytestmark = pytest.mark.usefixtures("short_is_long")

STREAMED = {"kvshare": {"streamed": True}}
AFTER = {"kvshare": {"num_tokens": 7}}
SOON_S = 10.0


@pytest.fixture(autouse=True)
def _lists_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is."""
    monkeypatch.setattr(models, "MAX_WAIT_S", 60.0)


@asynccontextmanager
async def streaming(**options: Any) -> AsyncIterator[Fleet]:
    """Two P, which have shown that they hand over while they compute, and two D."""
    async with fleet(0, 2, 2, **options) as f:
        for _ in f.prefillers:
            await f.post(chat())
        for engine in (*f.prefillers, *f.decoders):
            assert len(engine.bodies) == 1
            engine.bodies.clear()
        yield f


def hold(engine: FakeEngine, answer: Answer) -> Held:
    engine.answer = held = Held(answer)
    return held


async def until_asked(*helds: Held) -> None:
    """Return when all of them have a request, and none has answered."""
    async with asyncio.timeout(SOON_S):
        for held in helds:
            await held.asked.wait()


def handed_over(engine: FakeEngine) -> list[Any]:
    return [body.get("kv_transfer_params") for body in engine.bodies]


async def test_each_idle_p_works_beside_a_d_of_its_own() -> None:
    async with streaming() as f:
        p = [hold(engine, prefilled) for engine in f.prefillers]
        d = [hold(engine, decoded) for engine in f.decoders]
        asked = [asyncio.create_task(f.post(chat())) for _ in range(2)]
        await until_asked(*p, *d)
        assert [handed_over(engine) for engine in f.decoders] == [[STREAMED]] * 2
        for engine in (*f.prefillers, *f.decoders):
            engine.answer = prefilled if engine in f.prefillers else decoded
        response, _ = await f.post(chat())
        assert response.status == 200
        given = [params for engine in f.decoders for params in handed_over(engine)]
        assert sorted(given, key=str) == [AFTER, STREAMED, STREAMED], "no P was idle"
        for held in (*p, *d):
            held.let_go.set()
        for each in asked:
            response, _ = await each
            assert response.headers["x-ecshare-path"] == "prefill,decode"
        assert sum(len(engine.bodies) for engine in f.prefillers) == 3
        assert (await f.health())[1]["retries"]["made"] == 0


async def test_a_p_that_fails_leaves_the_request_to_another_p_and_a_d_beside_it() -> None:
    async with streaming() as f:
        failed, cancelled = hold(f.p, failing(500)), hold(f.d, decoded)
        second = hold(f.prefillers[1], prefilled), hold(f.decoders[1], decoded)
        asked = asyncio.create_task(f.post(chat()))
        await until_asked(failed, cancelled)
        assert not any(held.asked.is_set() for held in second)
        failed.let_go.set()
        await until_asked(*second)
        assert cancelled.left.is_set(), "nobody waits for what that P will not store"
        assert [handed_over(engine) for engine in f.decoders] == [[STREAMED]] * 2
        for held in second:
            held.let_go.set()
        response, _ = await asked
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "prefill,decode")
        assert [len(engine.bodies) for engine in f.prefillers] == [1, 1]
        health = (await f.health())[1]
        assert (health["retries"]["made"], health["fallbacks"]) == (1, 0)


async def test_d_answers_alone_when_every_p_has_failed() -> None:
    async with streaming() as f:
        failed = [hold(engine, failing(500)) for engine in f.prefillers]
        waiting = [hold(engine, decoded) for engine in f.decoders]
        asked = asyncio.create_task(f.post(chat()))
        for p, d in zip(failed, waiting, strict=True):
            await until_asked(p, d)
            p.let_go.set()
            if p is failed[-1]:
                f.d.answer = f.decoders[1].answer = decoded
        response, _ = await asked
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
        assert all(held.left.is_set() for held in waiting)
        given = [params for engine in f.decoders for params in handed_over(engine)]
        assert sorted(given, key=str) == [None, STREAMED, STREAMED]
        assert (await f.health())[1]["fallbacks"] == 1


async def test_a_d_that_fails_leaves_its_place_beside_p_to_another() -> None:
    async with streaming() as f:
        p, failed, second = hold(f.p, prefilled), hold(f.d, hang_up), hold(f.decoders[1], decoded)
        asked = asyncio.create_task(f.post(chat()))
        await until_asked(p, failed)
        failed.let_go.set()
        await until_asked(second)
        assert not p.left.is_set()
        assert [handed_over(engine) for engine in f.decoders] == [[STREAMED]] * 2
        for held in (p, second):
            held.let_go.set()
        response, _ = await asked
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "prefill,decode")
        assert [len(engine.bodies) for engine in f.prefillers] == [1, 0], "it has gone on"
        assert (await f.health())[1]["fallbacks"] == 0


async def test_pairs_serve_the_same_model() -> None:
    async with fleet(0, 2, 2) as f:
        for engines in (f.prefillers, f.decoders):
            engines[0].models, engines[1].models = ("a",), ("b",)
        for model in "ab":
            await f.post(chat() | {"model": model})
        p = [hold(engine, prefilled) for engine in f.prefillers]
        d = [hold(engine, decoded) for engine in f.decoders]
        asked = [asyncio.create_task(f.post(chat() | {"model": model})) for model in "ba"]
        await until_asked(*p, *d)
        for model, *engines in zip("ab", f.prefillers, f.decoders, strict=True):
            assert [engine.bodies[-1]["model"] for engine in engines] == [model, model]
        assert [handed_over(engine)[-1] for engine in f.decoders] == [STREAMED] * 2
        for held in (*p, *d):
            held.let_go.set()
        for each in asked:
            assert (await each)[0].status == 200
