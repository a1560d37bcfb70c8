# SPDX-License-Identifier: Apache-2.0
"""Requests return to the engines that have part of their work in their caches, within a bound."""

import asyncio
import random
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

from ecshare.router.fleet.engines import Engine, EnginePool
from ecshare.router.types import Stage, Work
from tests.ecshare.router.answers import encoded
from tests.ecshare.router.bodies import PNG, PNG_2, chat, picture
from tests.ecshare.router.fake_engine import Clock, answer_all, asked, fleet, lease
from tests.ecshare.router.held import Held, soon
from tests.waiting import until


def keys(number: int) -> list[bytes]:
    return [f"key {at}".encode() for at in range(number)]


def chosen(pool: EnginePool, key: bytes, tokens: int = 1) -> Engine:
    engine = pool.choose(work=Work(key, tokens))
    assert engine is not None
    return engine


@pytest.fixture
def pool(clock: Clock) -> EnginePool:
    return EnginePool(Stage.DECODE, "ab", 5.0, clock)


def test_a_key_has_one_engine_in_all_routers_in_any_order(pool: EnginePool, clock: Clock) -> None:
    pool.update("abc")
    homes = {key: chosen(pool, key) for key in keys(300)}
    assert {key: chosen(pool, key) for key in reversed(keys(300))} == homes
    assert all(60 < number < 140 for number in Counter(homes.values()).values())
    other = EnginePool(Stage.DECODE, "cab", 5.0, clock)
    assert all(chosen(other, key).url == homes[key].url for key in keys(50))


@pytest.mark.parametrize("is_failing", [False, True])
def test_only_keys_of_an_engine_that_goes_or_comes_move(is_failing: bool, pool: EnginePool) -> None:
    pool.update("abcd")
    before = {key: chosen(pool, key) for key in keys(200)}
    gone = next(iter(pool))
    if is_failing:
        gone.health.note_failure()
    else:
        gone.health.note_lost_connection()
    after = {key: chosen(pool, key) for key in keys(200)}
    assert all(after[key] is before[key] for key in keys(200) if before[key] is not gone)
    assert len({after[key] for key in keys(200) if before[key] is gone}) == 3
    gone.health.note_reached()
    gone.health.note_begin(None, serves=True)
    assert {key: chosen(pool, key) for key in keys(200)} == before
    pool.update("abcde")
    moved = [engine for key in keys(200) if (engine := chosen(pool, key)) is not before[key]]
    assert {engine.url for engine in moved} == {"e"}
    assert 20 < len(moved) < 70


@pytest.mark.parametrize("bound", [1.0, 1.25, 2.0])
def test_no_engine_gets_far_more_than_its_share(bound: float) -> None:
    """Even of one key, and of requests of very different size."""
    sizes = random.Random(1)
    pool = EnginePool(Stage.DECODE, "abc", 5.0, Clock(), bound)
    with ExitStack() as stack:
        largest = 0
        for number in range(500):
            tokens = sizes.choice([10, 100, 5000])
            largest = max(largest, tokens)
            key = b"the one" if number % 3 else f"{number}".encode()
            stack.enter_context(lease(pool, chosen(pool, key, tokens), tokens))
            loads = [engine.tokens for engine in pool]
            assert max(loads) <= bound * sum(loads) / 3 + largest
        assert min(loads) > 0
    assert [engine.tokens for engine in pool] == [0, 0, 0]


def test_a_little_more_work_does_not_move_a_key(pool: EnginePool) -> None:
    home = chosen(pool, b"key")
    other = next(each for each in pool if each is not home)
    with lease(pool, home, 1000):
        assert chosen(pool, b"key", 1000) is home
        assert chosen(pool, b"key", 100) is other, "work would wait for ten times its own"
    with lease(pool, home, 1200), lease(pool, other, 1000):
        assert chosen(pool, b"key", 1) is home
    with lease(pool, home, 1600), lease(pool, other, 900):
        assert chosen(pool, b"key", 1) is other


def test_work_without_a_key_goes_to_least_work_not_the_fewest_requests(pool: EnginePool) -> None:
    a, b = pool
    with lease(pool, a, 5000), lease(pool, b, 10), lease(pool, b, 10), lease(pool, b, 10):
        assert pool.choose(work=Work(b"", 10)) is b
        assert pool.choose([b], Work(b"", 10)) is a


def turns(conversation: int, number: int) -> list[dict[str, Any]]:
    """Return the messages of a conversation, up to one of its turns."""
    said = [{"role": "system", "content": "One for all."}]
    for at in range(number):
        question = f"question {at} of conversation {conversation}"
        said += [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes."}]
    return said[:-1]


async def test_conversations_return_to_their_engines() -> None:
    for balance in ("affinity", "load"):
        async with fleet(0, 2, 2, prefill="always", balance=balance) as f:
            for number in range(1, 6):
                for conversation in range(21):
                    said = turns(conversation, number)
                    assert (await f.post({"model": "m", "messages": said}))[0].status == 200
            for engines in (f.prefillers, f.decoders):
                assert all(engine.bodies for engine in engines)
                homes = [
                    {body["messages"][1]["content"] for body in engine.bodies} for engine in engines
                ]
                assert homes[0].isdisjoint(homes[1]) == (balance == "affinity")


async def test_a_picture_returns_to_the_engines_that_have_it() -> None:
    async with fleet(4, 4, 4, prefill="always", max_index_bytes=1, balance="affinity") as f:
        for number in range(4):
            question = {"type": "text", "text": f"question {number}"}
            assert (await f.post(chat(question, picture(PNG))))[0].status == 200
        for engines in (f.encoders, f.prefillers, f.decoders):
            assert asked(engines) == [0, 0, 0, 4]


async def test_pictures_of_one_request_are_encoded_by_all_at_once() -> None:
    pictures = [picture(PNG + bytes([number])) for number in range(8)]
    async with fleet(num_e=4, balance="affinity") as f:
        answer_all(f.encoders, held := Held(encoded))
        answer = asyncio.create_task(f.post(chat(*pictures)))
        await until(lambda: sum(asked(f.encoders)) == 8)
        assert asked(f.encoders) == [2, 2, 2, 2]
        held.let_go.set()
        assert (await answer)[0].status == 200


async def test_the_load_is_told_in_tokens() -> None:
    async with fleet(balance="affinity") as f:
        f.d.answer = held = Held(f.d.answer)
        answer = asyncio.create_task(f.post(chat(picture(PNG_2), max_tokens=50)))
        await soon(held.asked)
        stages = f.router.known()["engines"]
        assert stages["decode"][0]["tokens"] == 1 + len("what is this?") // 4 + 1000 + 50
        assert stages["prefill"][0]["tokens"] == 0
        held.let_go.set()
        await answer
        assert f.router.known()["engines"]["decode"][0]["tokens"] == 0
