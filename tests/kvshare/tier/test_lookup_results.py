# SPDX-License-Identifier: Apache-2.0
from vllm.v1.kv_offload.base import LookupResult

from kvshare.tier.lookup_results import LookupResults
from tests.kvshare.tier.offloading import key

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
ONE, TWO = key(1), key(2)


def test_a_question_is_asked_once_whoever_waits_for_it() -> None:
    verdicts = LookupResults()
    told = [verdicts.verdict(ONE, "a"), verdicts.verdict(TWO, "a"), verdicts.verdict(ONE, "b")]
    assert told == [RETRY] * 3
    assert verdicts.take_questions() == [(ONE, TWO)]
    assert verdicts.verdict(ONE, "c") is RETRY
    assert verdicts.take_questions() == []
    verdicts.answer(ONE, is_there=True)
    verdicts.answer(TWO, is_there=False)
    assert [verdicts.verdict(ONE, request) for request in "abc"] == [HIT] * 3
    assert verdicts.verdict(TWO, "a") is MISS
    assert verdicts.take_questions() == []


def test_questions_go_out_by_request() -> None:
    verdicts = LookupResults()
    verdicts.verdict(ONE, "a")
    verdicts.verdict(TWO, "b")
    assert verdicts.take_questions() == [(ONE,), (TWO,)]


def test_an_answer_holds_for_those_who_asked_before_it() -> None:
    verdicts = LookupResults()
    verdicts.verdict(ONE, "early")
    verdicts.take_questions()
    verdicts.answer(ONE, is_there=False)
    assert verdicts.verdict(ONE, "late") is RETRY
    assert verdicts.take_questions() == [(ONE,)]
    verdicts.answer(ONE, is_there=True)
    assert (verdicts.verdict(ONE, "early"), verdicts.verdict(ONE, "late")) == (MISS, HIT)


def test_what_is_lost_is_lost_for_all_who_were_told_of_it() -> None:
    verdicts = LookupResults()
    for request in "ab":
        verdicts.verdict(ONE, request)
    verdicts.answer(ONE, is_there=True)
    verdicts.lost([ONE, TWO])
    assert [verdicts.verdict(ONE, request) for request in "ab"] == [MISS] * 2
    assert verdicts.verdict(ONE, "c") is RETRY


def test_a_loss_stands_whatever_an_older_question_is_answered() -> None:
    verdicts = LookupResults()
    verdicts.verdict(ONE, "a")
    verdicts.lost([ONE])
    verdicts.answer(ONE, is_there=True)
    assert verdicts.verdict(ONE, "a") is MISS


def test_an_answer_for_requests_that_are_gone_is_for_nobody() -> None:
    verdicts = LookupResults()
    verdicts.verdict(ONE, "a")
    verdicts.take_questions()
    verdicts.forget("a")
    verdicts.forget("a")
    assert verdicts.verdict(ONE, "b") is RETRY
    assert verdicts.take_questions() == [], "it is being asked"
    verdicts.answer(ONE, is_there=True)
    assert verdicts.verdict(ONE, "b") is HIT
    verdicts.forget("b")
    assert not verdicts._of_key
    assert not verdicts._of_request
