# SPDX-License-Identifier: Apache-2.0
from vllm.v1.kv_offload.base import LookupResult

from kvshare.tier.lookup_results import LookupResults
from tests.kvshare.tier.offloading import key

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
ONE, TWO = key(1), key(2)


def test_requests_that_wait_for_a_chunk_share_one_query() -> None:
    results = LookupResults()
    first = [results.result(ONE, "a"), results.result(TWO, "a"), results.result(ONE, "b")]
    assert first == [RETRY] * 3
    assert results.take_queries() == [(ONE, TWO)]
    assert results.result(ONE, "c") is RETRY
    assert results.take_queries() == []
    results.answer(ONE, is_stored=True)
    results.answer(TWO, is_stored=False)
    assert [results.result(ONE, request) for request in "abc"] == [HIT] * 3
    assert results.result(TWO, "a") is MISS
    assert results.take_queries() == []


def test_queries_are_grouped_by_request() -> None:
    results = LookupResults()
    results.result(ONE, "a")
    results.result(TWO, "b")
    assert results.take_queries() == [(ONE,), (TWO,)]


def test_later_requests_cause_a_new_query() -> None:
    results = LookupResults()
    results.result(ONE, "early")
    results.take_queries()
    results.answer(ONE, is_stored=False)
    assert results.result(ONE, "late") is RETRY
    assert results.take_queries() == [(ONE,)]
    results.answer(ONE, is_stored=True)
    assert (results.result(ONE, "early"), results.result(ONE, "late")) == (MISS, HIT)


def test_lost_chunk_becomes_a_miss_for_all_current_requests() -> None:
    results = LookupResults()
    for request in "ab":
        results.result(ONE, request)
    results.answer(ONE, is_stored=True)
    results.lost([ONE, TWO])
    assert [results.result(ONE, request) for request in "ab"] == [MISS] * 2
    assert results.result(ONE, "c") is RETRY


def test_answer_to_an_older_query_does_not_undo_a_loss() -> None:
    results = LookupResults()
    results.result(ONE, "a")
    results.lost([ONE])
    results.answer(ONE, is_stored=True)
    assert results.result(ONE, "a") is MISS


def test_removed_request_leaves_no_results() -> None:
    results = LookupResults()
    results.result(ONE, "a")
    results.take_queries()
    results.remove_request("a")
    results.remove_request("a")
    assert results.result(ONE, "b") is RETRY
    assert results.take_queries() == [], "the first query is still in progress"
    results.answer(ONE, is_stored=True)
    assert results.result(ONE, "b") is HIT
    results.remove_request("b")
    assert not results._of_key
    assert not results._of_request
