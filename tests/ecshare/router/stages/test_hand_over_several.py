# SPDX-License-Identifier: Apache-2.0
"""D has its request while P computes, where there are several of each."""

from collections.abc import AsyncIterator

import pytest

from ecshare.router.fleet import models
from tests.ecshare.router.answers import decoded, failing, hang_up, prefilled
from tests.ecshare.router.bodies import chat
from tests.ecshare.router.fake_engine import Fleet, answer_all, fleet
from tests.ecshare.router.held import Held, soon

pytestmark = pytest.mark.usefixtures("short_is_long")

STREAMED = {"kvshare": {"streamed": True}}
AFTER = {"kvshare": {"num_tokens": 7}}


@pytest.fixture(autouse=True)
def _lists_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is."""
    monkeypatch.setattr(models, "MAX_WAIT_S", 60.0)


@pytest.fixture
async def f(short_is_long: None) -> AsyncIterator[Fleet]:
    """Two P, which have shown that they hand over while they compute, and two D."""
    async with fleet(0, 2, 2) as f:
        for _ in f.prefillers:
            await f.post(chat())
        for engine in (*f.prefillers, *f.decoders):
            assert len(engine.bodies) == 1
            engine.bodies.clear()
        yield f


async def until_asked(*helds: Held) -> None:
    """Return when all of them have a request, and none has answered."""
    await soon(*(held.asked for held in helds))


def let_go(*helds: Held) -> None:
    for held in helds:
        held.let_go.set()


async def test_each_idle_p_works_beside_a_d_of_its_own(f: Fleet) -> None:
    held = [engine.hold() for engine in (*f.prefillers, *f.decoders)]
    asked = [f.start(chat()) for _ in range(2)]
    await until_asked(*held)
    assert f.handed_over() == [STREAMED] * 2
    assert all(engine.bodies for engine in f.decoders)
    answer_all(f.prefillers, prefilled)
    answer_all(f.decoders, decoded)
    await f.way(chat())
    assert sorted(f.handed_over(), key=str) == [AFTER, STREAMED, STREAMED], "no P was idle"
    let_go(*held)
    for each in asked:
        assert (await each)[0].headers["x-ecshare-path"] == "prefill,decode"
    assert sum(len(engine.bodies) for engine in f.prefillers) == 3
    assert f.count("retries", "made") == 0


async def test_a_p_that_fails_leaves_the_request_to_another_p_and_a_d_beside_it(f: Fleet) -> None:
    failed, cancelled = f.p.hold(failing(500)), f.d.hold()
    second = f.prefillers[1].hold(), f.decoders[1].hold()
    asked = f.start(chat())
    await until_asked(failed, cancelled)
    assert not any(held.asked.is_set() for held in second)
    let_go(failed)
    await until_asked(*second)
    assert cancelled.left.is_set(), "nobody waits for what that P will not store"
    assert f.handed_over() == [STREAMED] * 2
    let_go(*second)
    response, _ = await asked
    assert (response.status, response.headers["x-ecshare-path"]) == (200, "prefill,decode")
    assert [len(engine.bodies) for engine in f.prefillers] == [1, 1]
    assert (f.count("retries", "made"), f.router.counts()["fallbacks"]) == (1, 0)


async def test_d_answers_alone_when_every_p_has_failed(f: Fleet) -> None:
    failed = [engine.hold(failing(500)) for engine in f.prefillers]
    waiting = [engine.hold() for engine in f.decoders]
    asked = f.start(chat())
    for p, d in zip(failed, waiting, strict=True):
        await until_asked(p, d)
        if p is failed[-1]:
            answer_all(f.decoders, decoded)
        let_go(p)
    response, _ = await asked
    assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
    assert all(held.left.is_set() for held in waiting)
    assert sorted(f.handed_over(), key=str) == [None, STREAMED, STREAMED]
    assert f.router.counts()["fallbacks"] == 1


async def test_a_d_that_fails_leaves_its_place_beside_p_to_another(f: Fleet) -> None:
    p, failed, second = f.p.hold(), f.d.hold(hang_up), f.decoders[1].hold()
    asked = f.start(chat())
    await until_asked(p, failed)
    let_go(failed)
    await until_asked(second)
    assert not p.left.is_set()
    assert f.handed_over() == [STREAMED] * 2
    let_go(p, second)
    response, _ = await asked
    assert (response.status, response.headers["x-ecshare-path"]) == (200, "prefill,decode")
    assert [len(engine.bodies) for engine in f.prefillers] == [1, 0], "it has gone on"
    assert f.router.counts()["fallbacks"] == 0


async def test_pairs_serve_the_same_model() -> None:
    async with fleet(0, 2, 2) as f:
        for engines in (f.prefillers, f.decoders):
            engines[0].models, engines[1].models = ("a",), ("b",)
        for model in "ab":
            await f.post(chat() | {"model": model})
        held = [engine.hold() for engine in (*f.prefillers, *f.decoders)]
        asked = [f.start(chat() | {"model": model}) for model in "ba"]
        await until_asked(*held)
        for engines in (f.prefillers, f.decoders):
            assert [engine.bodies[-1]["model"] for engine in engines] == ["a", "b"]
        assert f.handed_over() == [AFTER, STREAMED] * 2
        let_go(*held)
        assert [(await each)[0].status for each in asked] == [200] * 2
