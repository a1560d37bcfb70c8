# SPDX-License-Identifier: Apache-2.0
"""Which engine is next."""

from ecshare.router.workers import Workers
from tests.ecshare.router.fake_engine import Clock


def test_the_least_busy_engine_is_chosen() -> None:
    workers = Workers(["a", "b", "c"], 5.0, Clock())
    a, b, c = workers
    with workers.lease(a), workers.lease(a), workers.lease(b), workers.lease(c), workers.lease(c):
        assert workers.choose() is b
    assert [worker.in_flight for worker in workers] == [0, 0, 0]


def test_idle_engines_take_turns() -> None:
    workers = Workers(["a", "b", "c"], 5.0, Clock())
    turns = []
    for _ in range(6):
        worker = workers.choose()
        assert worker is not None
        with workers.lease(worker):
            turns.append(worker.url)
    assert turns == ["a", "b", "c", "a", "b", "c"]


def test_a_failed_engine_rests() -> None:
    clock = Clock()
    workers = Workers(["a", "b"], 5.0, clock)
    a, b = workers
    workers.mark_failed(a)
    with workers.lease(b):
        assert workers.choose() is b
    clock.now_s = 5.0
    with workers.lease(b):
        assert workers.choose() is a


def test_an_engine_that_answers_is_back_at_once() -> None:
    workers = Workers(["a"], 5.0, Clock())
    (a,) = workers
    workers.mark_failed(a)
    assert workers.choose() is None
    workers.mark_answered(a)
    assert workers.choose() is a


def test_soonest_is_the_one_to_try_when_all_rest() -> None:
    clock = Clock()
    workers = Workers(["a", "b"], 5.0, clock)
    a, b = workers
    workers.mark_failed(b)
    clock.now_s = 1.0
    workers.mark_failed(a)
    assert workers.choose() is None
    assert workers.soonest() is b


def test_a_stage_without_engines_has_nobody() -> None:
    workers = Workers([], 5.0, Clock())
    assert not workers
    assert workers.choose() is None
    assert workers.soonest() is None


def test_engines_that_were_tried_are_left_out() -> None:
    clock = Clock()
    workers = Workers(["a", "b", "c"], 5.0, clock)
    a, b, c = workers
    assert workers.choose([a]) is b
    workers.mark_failed(b)
    assert workers.choose([a]) is c
    assert workers.choose([a, c]) is None


def test_one_that_hung_waits_until_it_is_tried_again() -> None:
    clock = Clock()
    workers = Workers(["a", "b"], 5.0, clock)
    a, b = workers
    workers.mark_hung(a)
    assert not workers.try_again(a)
    clock.now_s = 100.0
    with workers.lease(b):
        assert workers.choose() is b
    assert workers.try_again(a)
    assert workers.choose() is a
    with workers.lease(a), workers.lease(b), workers.lease(b):
        assert workers.choose() is b, "one request at a time"
        workers.mark_alive(a)
        assert workers.choose() is a


def test_other_answers_do_not_shorten_the_rest_of_one_that_hung() -> None:
    clock = Clock()
    workers = Workers(["a"], 5.0, clock)
    (a,) = workers
    workers.mark_hung(a)
    workers.mark_answered(a)
    workers.mark_failed(a)
    assert not workers.try_again(a)
    clock.now_s = 5.0
    assert workers.try_again(a)


def test_the_rest_doubles_and_has_an_end() -> None:
    clock = Clock()
    workers = Workers(["a"], 5.0, clock)
    (a,) = workers
    rests_s = []
    for _ in range(9):
        workers.mark_hung(a)
        rests_s.append(a.down_until_s - clock.now_s)
        clock.now_s = a.down_until_s
        assert workers.try_again(a)
    assert rests_s == [5, 10, 20, 40, 80, 160, 320, 320, 320]


def test_one_that_hung_is_the_last_hope() -> None:
    workers = Workers(["a", "b"], 5.0, Clock())
    a, b = workers
    workers.mark_hung(a)
    for _ in range(2):
        workers.mark_failed(b)
    b.down_until_s = a.down_until_s + 1
    assert workers.soonest() is b


def test_several_are_the_best_first_and_one_at_least() -> None:
    workers = Workers(["a", "b", "c"], 5.0, Clock())
    a, b, c = workers
    with workers.lease(a), workers.lease(a), workers.lease(b):
        assert workers.several(3) == [c, b, a]
        assert workers.several(2) == [c, b]
        workers.mark_hung(c)
        assert workers.several(3) == [b, a]
    for worker in (a, b):
        workers.mark_failed(worker)
    assert workers.several(3) == [a]
    assert Workers([], 5.0, Clock()).several(3) == []
