# SPDX-License-Identifier: Apache-2.0
"""Whole engines with a toy model over one store: the tokens are always right."""

from pathlib import Path

import pytest

from tests.kvshare.conftest import StartEngine
from tests.kvshare.toy import BLOCK, expected_answer, make_request, objects, serve

LONG = list(range(100, 100 + 5 * BLOCK + 3))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 6, 8, 23, 24, 25])
def test_the_second_engine_computes_one_token(
    start: StartEngine, num_tokens: int, is_async: bool
) -> None:
    prompt = LONG[:num_tokens] if num_tokens <= len(LONG) else list(range(num_tokens))
    first = start(is_async=is_async)
    assert serve(first, prompt).computed_prompt_tokens == num_tokens
    second = start(is_async=is_async)
    assert serve(second, prompt).computed_prompt_tokens == 1
    assert second.counts.get("tokens/loaded", 0) == num_tokens - 1
    assert second.counts.get("tokens/hit", 0) == num_tokens - 1
    assert "blocks/failed" not in second.counts


def test_prompts_share_full_blocks_of_their_common_prefix(start: StartEngine) -> None:
    serve(start(), LONG)
    other = [*LONG[: 3 * BLOCK + 2], 7, 8, 9]
    answer = serve(start(), other)
    assert answer.computed_prompt_tokens == len(other) - 3 * BLOCK


def test_next_prompt_loads_the_answer_of_another_engine(start: StartEngine) -> None:
    answer = serve(start(), LONG, max_tokens=10)
    conversation = [*LONG, *answer.tokens, 1, 2]
    second = serve(start(), conversation)
    # The last token of an answer is sampled, not computed.
    stored = (len(LONG) + 9) // BLOCK * BLOCK
    assert second.computed_prompt_tokens == len(conversation) - stored


def test_blocks_in_the_local_prefix_cache_are_not_loaded(start: StartEngine) -> None:
    engine = start()
    serve(engine, LONG, name="one")
    engine.counts.clear()
    assert serve(engine, LONG, name="two").computed_prompt_tokens == 1
    assert engine.counts["blocks/loaded"] == 1, "the tail alone"
    assert "blocks/saved" not in engine.counts


def test_engine_without_local_prefix_cache_loads_its_own_saves(start: StartEngine) -> None:
    engine = start(enable_prefix_caching=False)
    serve(engine, LONG, name="one")
    assert serve(engine, LONG, name="two").computed_prompt_tokens == 1


def test_chunked_prefill_saves_every_block(start: StartEngine) -> None:
    first = start(max_num_batched_tokens=7, max_num_seqs=4)
    serve(first, LONG)
    assert serve(start(), LONG).computed_prompt_tokens == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_many_requests_with_shared_prefixes_get_right_tokens(
    start: StartEngine, is_async: bool
) -> None:
    prompts = [[*LONG[: number % 20 + 1], *range(number)] for number in range(1, 25)]
    for engine in [start(is_async=is_async, num_blocks=256) for _ in range(2)]:
        requests = [make_request(f"r{i}", prompt, 6) for i, prompt in enumerate(prompts)]
        for prompt, answer in zip(prompts, engine.run(*requests), strict=True):
            assert answer.tokens == expected_answer(prompt, 6)
    assert {answer.computed_prompt_tokens for answer in engine.answers.values()} == {1}


@pytest.mark.parametrize("is_async", [False, True])
def test_preempted_requests_resume_from_the_store(start: StartEngine, is_async: bool) -> None:
    """Too few blocks for all: requests are preempted, and resume from the store."""
    prompts = [[number, *LONG[:9]] for number in range(6)]
    engine = start(num_blocks=20, is_async=is_async)
    requests = [make_request(f"r{i}", prompt, 20) for i, prompt in enumerate(prompts)]
    for prompt, answer in zip(prompts, engine.run(*requests), strict=True):
        assert answer.tokens == expected_answer(prompt, 20)
    assert any(request.num_preemptions for request in requests)
    assert engine.counts["tokens/loaded"] > 0


# --- roles ---


def test_consumer_saves_nothing_and_producer_loads_nothing(
    start: StartEngine, tmp_path: Path
) -> None:
    assert serve(start("kv_consumer"), LONG).computed_prompt_tokens == len(LONG)
    assert objects(tmp_path) == [], "a consumer saves nothing"
    serve(start("kv_producer"), LONG)
    assert len(objects(tmp_path)) > 0
    producer = start("kv_producer")
    assert serve(producer, LONG).computed_prompt_tokens == len(LONG), "a producer loads nothing"
    assert "tokens/queried" not in producer.counts
    assert serve(start("kv_consumer"), LONG).computed_prompt_tokens == 1


def test_producer_announces_the_number_of_stored_tokens(start: StartEngine) -> None:
    announced = {"kvshare": {"num_tokens": len(LONG) - 1, "size": 1}}
    assert serve(start("kv_producer"), LONG, max_tokens=1).kv_transfer_params == announced
    assert serve(start("kv_both"), LONG, max_tokens=1).kv_transfer_params == announced
    assert serve(start("kv_consumer"), LONG).kv_transfer_params is None
    assert serve(start("kv_both"), [1]).kv_transfer_params is None
