# SPDX-License-Identifier: Apache-2.0
from vllm.v1.kv_offload.base import LookupResult

from kvshare.tier.lookup_results import LookupResults
from tests.kvshare.tier.offloading import key

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
ONE, TWO = key(1), key(2)


def test_a_question_is_asked_once_whoever_waits_for_it() -> None:
    results = LookupResults()
    told = [results.result(ONE, "a"), results.result(TWO, "a"), results.result(ONE, "b")]
    assert told == [RETRY] * 3
    assert results.take_questions() == [(ONE, TWO)]
    assert results.result(ONE, "c") is RETRY
    assert results.take_questions() == []
    results.answer(ONE, is_there=True)
    results.answer(TWO, is_there=False)
    assert [results.result(ONE, request) for request in "abc"] == [HIT] * 3
    assert results.result(TWO, "a") is MISS
    assert results.take_questions() == []


def test_questions_go_out_by_request() -> None:
    results = LookupResults()
    results.result(ONE, "a")
    results.result(TWO, "b")
    assert results.take_questions() == [(ONE,), (TWO,)]


def test_an_answer_holds_for_those_who_asked_before_it() -> None:
    results = LookupResults()
    results.result(ONE, "early")
    results.take_questions()
    results.answer(ONE, is_there=False)
    assert results.result(ONE, "late") is RETRY
    assert results.take_questions() == [(ONE,)]
    results.answer(ONE, is_there=True)
    assert (results.result(ONE, "early"), results.result(ONE, "late")) == (MISS, HIT)


def test_who_came_after_a_question_that_is_answered_too_late_has_one_of_its_own() -> None:
    results = LookupResults()
    results.result(ONE, "first")
    assert results.take_questions() == [(ONE,)]
    for name in ("second", "third"):
        results.result(ONE, name)
    assert results.take_questions() == []
    results.late(ONE)
    assert results.result(ONE, "first") is MISS
    assert results.result(ONE, "second") is results.result(ONE, "third") is RETRY
    assert results.take_questions() == [(ONE,)]
    results.late(ONE)
    assert results.result(ONE, "second") is results.result(ONE, "third") is MISS
    assert results.take_questions() == []


def test_what_is_lost_is_lost_for_all_who_were_told_of_it() -> None:
    results = LookupResults()
    for request in "ab":
        results.result(ONE, request)
    results.answer(ONE, is_there=True)
    results.lost([ONE, TWO])
    assert [results.result(ONE, request) for request in "ab"] == [MISS] * 2
    assert results.result(ONE, "c") is RETRY


def test_a_loss_stands_whatever_an_older_question_is_answered() -> None:
    results = LookupResults()
    results.result(ONE, "a")
    results.lost([ONE])
    results.answer(ONE, is_there=True)
    assert results.result(ONE, "a") is MISS


def test_an_answer_for_requests_that_are_gone_is_for_nobody() -> None:
    results = LookupResults()
    results.result(ONE, "a")
    results.take_questions()
    results.forget("a")
    results.forget("a")
    assert results.result(ONE, "b") is RETRY
    assert results.take_questions() == [], "it is being asked"
    results.answer(ONE, is_there=True)
    assert results.result(ONE, "b") is HIT
    results.forget("b")
    assert not results._of_key
    assert not results._of_request
