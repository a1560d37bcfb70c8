# SPDX-License-Identifier: Apache-2.0
"""Which engine is next."""

from contextlib import ExitStack

from ecshare.router.fleet.engines import EnginePool
from ecshare.router.types import Stage
from tests.ecshare.router.fake_engine import Clock, lease


def test_the_least_busy_engine_is_chosen() -> None:
    engines = EnginePool(Stage.DECODE, ["a", "b", "c"], 5.0, Clock())
    a, b, c = engines
    with ExitStack() as stack:
        for engine in (a, a, b, c, c):
            stack.enter_context(lease(engines, engine))
        assert engines.choose() is b
    assert [engine.in_flight for engine in engines] == [0, 0, 0]


def test_idle_engines_take_turns() -> None:
    engines = EnginePool(Stage.DECODE, ["a", "b", "c"], 5.0, Clock())
    turns = []
    for _ in range(6):
        engine = engines.choose()
        assert engine is not None
        with lease(engines, engine):
            turns.append(engine.url)
    assert turns == ["a", "b", "c", "a", "b", "c"]


def test_a_failed_engine_rests() -> None:
    clock = Clock()
    engines = EnginePool(Stage.DECODE, ["a", "b"], 5.0, clock)
    a, b = engines
    engines.mark_failed(a)
    with lease(engines, b):
        assert engines.choose() is b
    clock.now_s = 5.0
    with lease(engines, b):
        assert engines.choose() is a


def test_an_engine_that_answers_is_back_at_once() -> None:
    engines = EnginePool(Stage.DECODE, ["a"], 5.0, Clock())
    (a,) = engines
    engines.mark_failed(a)
    assert engines.choose() is None
    engines.mark_answered(a)
    assert engines.choose() is a


def test_soonest_is_the_one_to_try_when_all_rest() -> None:
    clock = Clock()
    engines = EnginePool(Stage.DECODE, ["a", "b"], 5.0, clock)
    a, b = engines
    engines.mark_failed(b)
    clock.now_s = 1.0
    engines.mark_failed(a)
    assert engines.choose() is None
    assert engines.soonest_available() is b


def test_a_stage_without_engines_has_nobody() -> None:
    engines = EnginePool(Stage.DECODE, [], 5.0, Clock())
    assert not engines
    assert engines.choose() is None
    assert engines.soonest_available() is None


def test_engines_that_were_tried_are_left_out() -> None:
    clock = Clock()
    engines = EnginePool(Stage.DECODE, ["a", "b", "c"], 5.0, clock)
    a, b, c = engines
    assert engines.choose([a]) is b
    engines.mark_failed(b)
    assert engines.choose([a]) is c
    assert engines.choose([a, c]) is None


def test_one_that_hung_waits_until_it_is_tried_again() -> None:
    clock = Clock()
    engines = EnginePool(Stage.DECODE, ["a", "b"], 5.0, clock)
    a, b = engines
    engines.mark_hung(a)
    assert not engines.try_recover(a)
    clock.now_s = 100.0
    with lease(engines, b):
        assert engines.choose() is b
    assert engines.try_recover(a)
    assert engines.choose() is a
    with lease(engines, a), lease(engines, b), lease(engines, b):
        assert engines.choose() is b, "one request at a time"
        engines.mark_alive(a)
        assert engines.choose() is a


def test_other_answers_do_not_shorten_the_rest_of_one_that_hung() -> None:
    clock = Clock()
    engines = EnginePool(Stage.DECODE, ["a"], 5.0, clock)
    (a,) = engines
    engines.mark_hung(a)
    engines.mark_answered(a)
    engines.mark_failed(a)
    assert not engines.try_recover(a)
    clock.now_s = 5.0
    assert engines.try_recover(a)


def test_the_rest_doubles_and_has_an_end() -> None:
    clock = Clock()
    engines = EnginePool(Stage.DECODE, ["a"], 5.0, clock)
    (a,) = engines
    rests_s = []
    for _ in range(9):
        engines.mark_hung(a)
        rests_s.append(a.down_until_s - clock.now_s)
        clock.now_s = a.down_until_s
        assert engines.try_recover(a)
    assert rests_s == [5, 10, 20, 40, 80, 160, 320, 320, 320]


def test_one_that_hung_is_the_last_hope() -> None:
    engines = EnginePool(Stage.DECODE, ["a", "b"], 5.0, Clock())
    a, b = engines
    engines.mark_hung(a)
    for _ in range(2):
        engines.mark_failed(b)
    b.down_until_s = a.down_until_s + 1
    assert engines.soonest_available() is b


def test_several_are_the_best_first_and_one_at_least() -> None:
    engines = EnginePool(Stage.DECODE, ["a", "b", "c"], 5.0, Clock())
    a, b, c = engines
    with lease(engines, a), lease(engines, a), lease(engines, b):
        assert engines.ranked(3) == [c, b, a]
        assert engines.ranked(2) == [c, b]
        engines.mark_hung(c)
        assert engines.ranked(3) == [b, a]
    for engine in (a, b):
        engines.mark_failed(engine)
    assert engines.ranked(3) == [a]
    assert EnginePool(Stage.DECODE, [], 5.0, Clock()).ranked(3) == []
