# SPDX-License-Identifier: Apache-2.0
"""Rules that decline saves: declined chunks are counted and not announced; answers stay right."""

from pathlib import Path
from typing import Any

import pytest

from kvshare.messages import announced_tokens
from tests.kvshare.conftest import StartEngine
from tests.kvshare.toy import (
    BLOCK,
    FOR_DECODE,
    TOLD,
    Answer,
    ToyEngine,
    expected_answer,
    make_request,
    objects,
)

PROMPT = list(range(3 * BLOCK + 2))
ALL = len(PROMPT) - 1  # the tokens that a reader can use
OTHER_END = [*PROMPT[: 2 * BLOCK], *range(100, 100 + BLOCK + 2)]


def ask(engine: ToyEngine, name: str, prompt: list[int] = PROMPT, **more: Any) -> Answer:
    """Serve a request, by default for two tokens, and check them."""
    (answer,) = engine.run(make_request(name, prompt, more.pop("max_tokens", 2), **more))
    assert answer.tokens == expected_answer(prompt, len(answer.tokens))
    return answer


def announced(answer: Answer, prompt: list[int] = PROMPT) -> int:
    """Return how many prompt tokens a reader expects from the answer's announcement."""
    params = answer.kv_transfer_params
    return announced_tokens(make_request("reader", prompt, kv_transfer_params=params))


def num_stored(folder: Path) -> int:
    return len(objects(folder))


def test_by_default_every_prompt_is_stored_at_once(start: StartEngine, tmp_path: Path) -> None:
    assert announced(ask(start(), "first")) == ALL
    assert num_stored(tmp_path) == 4


@pytest.mark.parametrize("is_async", [False, True])
def test_prompt_is_stored_once_seen_save_after_times(
    start: StartEngine, tmp_path: Path, is_async: bool
) -> None:
    engine = start(store={"save_after": 3}, is_async=is_async)
    for name in ("first", "second"):
        assert announced(ask(engine, name)) == 0
        assert num_stored(tmp_path) == 0
    assert engine.counts["declined/save_after"] == 2 * 4  # three blocks and a tail, twice
    assert "blocks/dropped" not in engine.counts
    assert announced(ask(engine, "third")) == ALL
    assert num_stored(tmp_path) == 4
    assert engine.counts["declined/save_after"] == 2 * 4


def test_shared_prefix_is_stored_without_the_rest(start: StartEngine, tmp_path: Path) -> None:
    engine = start(store={"save_after": 2})
    ask(engine, "first")
    answer = ask(engine, "second", OTHER_END)
    assert announced(answer, OTHER_END) == 2 * BLOCK
    assert num_stored(tmp_path) == 2
    reader = start("kv_consumer")
    assert ask(reader, "reader", OTHER_END).computed_prompt_tokens == len(OTHER_END) - 2 * BLOCK


def test_prefill_for_another_engine_is_stored_regardless_of_rules(
    start: StartEngine, tmp_path: Path
) -> None:
    """Both the engine's role and the router's field in the request mark a prefill."""
    rules = {"save_after": 9, "save_min_tokens": 1000}
    by_role = start("kv_producer", store=rules)
    assert announced(ask(by_role, "answer", kv_transfer_params=None)) == 0
    assert num_stored(tmp_path) == 0
    assert announced(ask(by_role, "prefill", max_tokens=1, kv_transfer_params=None)) == ALL
    assert num_stored(tmp_path) == 4
    by_request = start(folder=tmp_path / "other", store=rules)
    assert announced(ask(by_request, "prefill", kv_transfer_params=FOR_DECODE)) == ALL
    assert num_stored(tmp_path / "other") == 4


@pytest.mark.parametrize("rule", [{"save_after": 100}, {"save_min_tokens": 1000}])
def test_max_tokens_of_one_is_not_taken_for_a_prefill(
    start: StartEngine, tmp_path: Path, rule: dict[str, int]
) -> None:
    """A beam search step and a scored prompt are requests for one token, too."""
    engine = start(store=rule)
    for number in range(8):
        beam = [*PROMPT, *range(number)]
        answer = ask(engine, f"beam {number}", beam, max_tokens=1, kv_transfer_params=None)
        assert answer.kv_transfer_params is None
        ask(engine, f"score {number}", [1000 - number, *PROMPT], max_tokens=1)
    assert num_stored(tmp_path) == 0


@pytest.mark.parametrize("params", [None, {}, {"kvshare_save": True}, {"kvshare": 1}])
def test_answer_has_no_params_unless_the_client_asked(
    start: StartEngine, tmp_path: Path, params: Any
) -> None:
    for max_tokens in (1, 2):
        answer = ask(start(), f"r{max_tokens}", max_tokens=max_tokens, kv_transfer_params=params)
        assert answer.kv_transfer_params is None
    assert num_stored(tmp_path) == 4


@pytest.mark.parametrize(("limit", "expected"), [(ALL, ALL), (ALL + 1, 0)])
def test_prompts_below_save_min_tokens_are_not_stored(
    start: StartEngine, tmp_path: Path, limit: int, expected: int
) -> None:
    engine = start(store={"save_min_tokens": limit})
    assert announced(ask(engine, "r")) == expected
    assert num_stored(tmp_path) == (4 if expected else 0)
    assert engine.counts.get("declined/save_min_tokens", 0) == (0 if expected else 4)


def test_answers_are_not_stored_with_save_answers_off(start: StartEngine, tmp_path: Path) -> None:
    engine = start(store={"save_answers": False})
    # The answer fills two more blocks.
    assert announced(ask(engine, "r", max_tokens=2 * BLOCK)) == ALL
    assert num_stored(tmp_path) == 4
    assert engine.counts["declined/save_answers"] == 2
    other = start(folder=tmp_path / "other")
    ask(other, "r", max_tokens=2 * BLOCK)
    assert num_stored(tmp_path / "other") == 4 + 2


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_request_with_kvshare_save_false_is_not_stored(
    start: StartEngine, tmp_path: Path, max_tokens: int
) -> None:
    engine = start()
    params = {"kvshare_save": False}
    answer = ask(engine, "private", max_tokens=max_tokens, kv_transfer_params=params)
    assert announced(answer) == 0
    assert num_stored(tmp_path) == 0
    assert engine.counts["declined/request"] == 4
    assert announced(ask(engine, "public")) == ALL
    assert num_stored(tmp_path) == 4


@pytest.mark.parametrize("params", [TOLD | {"kvshare_save": True}, {"do_remote_decode": True}])
def test_request_with_kvshare_save_true_overrides_the_rules(
    start: StartEngine, tmp_path: Path, params: Any
) -> None:
    engine = start(store={"save_after": 9, "save_min_tokens": 1000})
    assert announced(ask(engine, "r", kv_transfer_params=params)) == ALL
    assert num_stored(tmp_path) == 4


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_prompt_that_is_fetched_directly_is_stored_by_the_rules(
    start: StartEngine, tmp_path: Path, role: str
) -> None:
    """No engine waits for what is stored of it."""
    directly = {"do_remote_decode": True, "kvshare": {"for_decode": False}}
    engine = start(role, store={"save_after": 2})
    assert announced(ask(engine, "a", max_tokens=1, kv_transfer_params=directly)) == 0
    assert num_stored(tmp_path) == 0
    assert engine.counts["declined/save_after"] == 4
    assert announced(ask(engine, "b", max_tokens=1, kv_transfer_params=directly)) == ALL
    assert num_stored(tmp_path) == 4


@pytest.mark.parametrize(
    "params",
    [
        {"kvshare_save": 0},
        {"kvshare_save": "false"},
        {"kvshare_save": None},
        {"kvshare_save": [False]},
        {"kvshare_save": {"save": False}},
        {"kvshare": {"save": False}},
        {"kvshare": {"for_decode": False}},
        {"ecshare_save": False},
        {"do_remote_decode": False},
    ],
)
def test_malformed_fields_are_ignored(start: StartEngine, tmp_path: Path, params: Any) -> None:
    assert announced(ask(start(), "r", kv_transfer_params=TOLD | params)) == ALL
    assert num_stored(tmp_path) == 4


@pytest.mark.parametrize("said", [1, "true", None, [True]])
def test_only_the_value_true_counts_as_a_coordinators_order(start: StartEngine, said: Any) -> None:
    engine = start(store={"save_after": 9})
    assert announced(ask(engine, "r", kv_transfer_params={"do_remote_decode": said})) == 0
    ours = {"kvshare": {"for_decode": said}}
    assert announced(ask(engine, "s", kv_transfer_params=ours)) == 0
    assert engine.counts["declined/save_after"] == 2 * 4


def test_kvshare_save_false_does_not_disable_an_announced_load(
    start: StartEngine, tmp_path: Path
) -> None:
    params = ask(start("kv_producer"), "p", max_tokens=1).kv_transfer_params
    reader = start(folder=tmp_path / "host-2", store={"url": f"file://{tmp_path}/store"})
    params = {**(params or {}), "kvshare_save": False}
    assert ask(reader, "d", kv_transfer_params=params).computed_prompt_tokens == 1


def test_stored_prompt_is_announced_although_rules_decline_it(
    start: StartEngine,
) -> None:
    ask(start("kv_producer"), "p", max_tokens=1)
    engine = start(store={"save_after": 2})
    assert announced(ask(engine, "r")) == ALL
    assert not engine.counts.get("declined/save_after")


def test_preempted_request_counts_once_for_save_after(start: StartEngine, tmp_path: Path) -> None:
    engine = start(num_blocks=12, store={"save_after": 3})
    prompts = [[*range(n, n + 4 * BLOCK)] for n in (0, 100, 200)]
    requests = [make_request(str(n), prompt, 4 * BLOCK) for n, prompt in enumerate(prompts)]
    for prompt, answer in zip(prompts, engine.run(*requests), strict=True):
        assert answer.tokens == expected_answer(prompt, 4 * BLOCK)
    assert any(request.num_preemptions for request in requests)
    for n, prompt in enumerate(prompts):
        ask(engine, f"again {n}", prompt)
    assert num_stored(tmp_path) == 0
