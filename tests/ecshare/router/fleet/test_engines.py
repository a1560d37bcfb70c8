# SPDX-License-Identifier: Apache-2.0
"""Which engine is next, and how its health decides it."""

import pytest

from ecshare.router.fleet.engines import Engine, EnginePool
from ecshare.router.fleet.health import Wait
from ecshare.router.types import Stage
from tests.ecshare.router.fake_engine import Clock, lease

COOL_DOWN_S = 5.0


@pytest.fixture
def pool(clock: Clock) -> EnginePool:
    return EnginePool(Stage.DECODE, "abc", COOL_DOWN_S, clock)


def hang(engine: Engine) -> None:
    engine.health.note_poll(is_healthy=False, silent_s=1.0)


def recovers(engine: Engine) -> bool:
    """Let the /health of a hung engine answer; tell whether it is tried."""
    engine.health.note_poll(is_healthy=True, silent_s=1.0)
    return not engine.health.is_hung


def test_the_least_busy_engine_is_chosen_and_idle_ones_take_turns(pool: EnginePool) -> None:
    a, b, c = pool
    with lease(pool, a), lease(pool, a), lease(pool, b), lease(pool, c), lease(pool, c):
        assert pool.choose() is b
    assert [engine.in_flight for engine in pool] == [0, 0, 0]
    turns = []
    for _ in range(6):
        (engine, *_) = pool.ranked()
        assert engine is pool.choose()
        with lease(pool, engine):
            turns.append(engine)
    assert turns == [a, b, c, a, b, c]
    assert pool.choose([a]) is b
    assert pool.choose([a, b, c]) is None


def test_one_that_cannot_be_reached_rests_until_it_answers(pool: EnginePool, clock: Clock) -> None:
    a, *others = pool
    for back in ("cool-down", "answer"):
        a.health.note_lost_connection()
        assert (a.state, pool.choose(others)) == ("down", None)
        if back == "cool-down":
            clock.now_s += COOL_DOWN_S
        else:
            a.health.note_reached()
        assert (a.state, pool.choose(others)) == ("up", a)


def test_the_last_to_try_are_those_at_rest_the_first_first(pool: EnginePool, clock: Clock) -> None:
    a, b, c = pool
    hang(b)
    clock.now_s = 1.0
    a.health.note_lost_connection()
    clock.now_s = 0.5
    c.health.note_lost_connection()
    assert pool.choose() is None
    assert pool.ranked() == pool.ranked("a model of nobody") == [c, a, b]
    none = EnginePool(Stage.DECODE, [], COOL_DOWN_S, clock)
    assert not none
    assert (none.choose(), none.ranked()) == (None, [])


def test_a_failing_engine_comes_last_until_it_serves(pool: EnginePool, clock: Clock) -> None:
    a, b, c = pool
    a.health.note_failure()
    with lease(pool, b), lease(pool, b), lease(pool, c):
        assert pool.ranked() == [c, b, a]
        assert pool.choose() is c
        assert pool.choose([b, c]) is a, "better than none"
        b.health.note_failure()
        assert pool.choose([c]) is a
        b.health.note_begin(None, serves=True)
        for serves, state in ((False, "failing"), (True, "up")):
            a.health.note_begin(None, serves=serves)
            assert a.state == state
        a.health.note_failure()
        clock.now_s = COOL_DOWN_S
        assert pool.choose() is a


def test_one_that_hung_is_tried_with_one_request_at_a_time(pool: EnginePool, clock: Clock) -> None:
    a, *others = pool
    hang(a)
    assert not recovers(a)
    clock.now_s = 100.0
    assert pool.choose(others) is None, "its /health has not answered since"
    a.health.note_poll(is_healthy=False, silent_s=1.0)
    assert a.state == "down"
    assert recovers(a)
    assert pool.choose(others) is a
    with lease(pool, a):
        assert pool.choose(others) is None
        a.health.note_sign_of_life()
        assert pool.choose(others) is a


def test_the_rest_of_one_that_hangs_doubles_has_an_end_and_no_answer_shortens_it(
    pool: EnginePool, clock: Clock
) -> None:
    a, *_ = pool
    rests_s = []
    for _ in range(9):
        hang(a)
        a.health.note_reached()
        a.health.note_lost_connection()
        until_s = a.health.down_until_s
        rests_s.append(until_s - clock.now_s)
        clock.now_s = until_s - 0.1
        assert not recovers(a)
        clock.now_s = until_s
        assert recovers(a)
    assert rests_s == [5, 10, 20, 40, 80, 160, 320, 320, 320]


def waiting(engine: Engine, clock: Clock, limit_s: float = 10.0) -> Wait:
    wait = Wait(limit_s, clock, lambda: False, lambda error: None)
    engine.health.begin_wait(wait)
    return wait


def test_patience_lasts_as_long_as_the_shortest_limit_and_begins_anew_with_each_sign_of_life(
    pool: EnginePool, clock: Clock
) -> None:
    a, *_ = pool
    for limit_s in (8.0, 16.0):
        waiting(a, clock, limit_s)
    for _ in range(3):
        for _ in range(7):
            a.health.note_poll(is_healthy=True, silent_s=1.0)
        assert not a.health.is_hung
        a.health.note_sign_of_life()
    for _ in range(8):
        assert not a.health.is_hung
        a.health.note_poll(is_healthy=True, silent_s=1.0)
    assert a.health.is_hung


@pytest.mark.parametrize(
    ("waited_s", "is_silent", "has_signs", "hangs"),
    [(10, True, False, True), (9, True, False, False), (10, False, False, False)]
    + [(10, True, True, False)],
)
def test_a_wait_that_ends_late_is_evidence_unless_others_had_answers(
    pool: EnginePool, clock: Clock, waited_s: int, is_silent: bool, has_signs: bool, hangs: bool
) -> None:
    a, *_ = pool
    wait = waiting(a, clock)
    clock.now_s = waited_s
    if has_signs:
        a.health.note_sign_of_life()
    (a.health.note_silence if is_silent else a.health.end_wait)(wait)
    assert (a.health.is_hung, a.health.is_in_doubt) == (hangs, is_silent)
    assert not a.health.waits


def test_engines_that_stay_or_return_keep_their_state_and_are_tried(pool: EnginePool) -> None:
    """Nobody polls those that are gone, which finish their requests."""
    a, b, c = pool
    hang(a)
    b.health.note_lost_connection()
    with lease(pool, a, 100):
        pool.update("bd")
        assert (a.state, b.state, pool.leaving) == ("draining", "down", [a])
        assert pool.choose() is [*pool][1]
        pool.update("ab")
        assert [*pool] == [a, b]
        assert (a.health.is_hung, a.tokens, pool.leaving) == (False, 100, [])
    assert a.tokens == 0
    assert c.is_leaving
