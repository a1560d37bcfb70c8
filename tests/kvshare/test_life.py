# SPDX-License-Identifier: Apache-2.0
"""vLLM preempts, resets, speculates and sleeps: no wrong KV may reach the store."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from kvshare.connector import KVShareConnector
from lab.vllm_loop import RUNNERS, RunnerName
from tests.kvshare.conftest import StartEngine, is_at_rest, sleep_and_wake, spin
from tests.kvshare.gated import GatedFileSystem
from tests.kvshare.toy import (
    BLOCK,
    Answer,
    ToyEngine,
    ToyModel,
    expected_answer,
    make_request,
    objects,
    serve,
)

LONG = list(range(100, 100 + 13 * BLOCK + 3))
NUM_GUESSES = 5


def chunked(blocks: int) -> dict[str, Any]:
    return {"chunk_tokens": blocks * BLOCK}


# --- speculative decoding ---


class GuessingModel(ToyModel):
    """Drafts tokens, some right and then wrong ones, and writes the KV of all of them."""

    num_rejected = 0
    num_accepted = 0

    def forward(self, output: SchedulerOutput) -> list[list[int]]:
        self._guesses = output.scheduled_spec_decode_tokens
        self._names = list(output.num_scheduled_tokens)
        return super().forward(output)

    def compute(self, request_id: str, start: int, end: int) -> list[int]:
        row = self.rows[request_id]
        num_known = len(row.tokens)
        sampled = super().compute(request_id, start, min(end, num_known))
        drafts = self._guesses.get(request_id, [])[: max(0, end - num_known)]
        for number, draft in enumerate(drafts):
            position = num_known + number
            if draft != row.tokens[position]:
                wrong = [*row.tokens[:position], *drafts[number:]]
                for at in range(position, len(wrong)):
                    self.fill(row, at, wrong[: at + 1])
                self.num_rejected += len(drafts) - number
                break
            self.num_accepted += 1
            sampled += super().compute(request_id, position, position + 1)
        return sampled

    def take_draft_token_ids(self) -> DraftTokenIds:
        guesses = [self._guess(self.rows[name].tokens) for name in self._names]
        return DraftTokenIds(self._names, guesses)

    def _guess(self, tokens: list[int]) -> list[int]:
        right = expected_answer(tokens, NUM_GUESSES)
        num_right = len(tokens) % (NUM_GUESSES + 1)
        return [*right[:num_right], *(999 for _ in right[num_right:])]


SPECULATING = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": NUM_GUESSES,
        "prompt_lookup_max": 2,
    }
}


@pytest.mark.parametrize("chunk_blocks", [1, 3])
def test_kv_of_rejected_draft_tokens_is_never_stored(start: StartEngine, chunk_blocks: int) -> None:
    store = chunked(chunk_blocks)
    talk = LONG[: 5 * BLOCK]
    for turn in range(4):
        guessing = start(model=GuessingModel, store=store, **SPECULATING)
        answer = serve(guessing, talk, max_tokens=23 + turn)
        assert isinstance(guessing.model, GuessingModel)
        assert guessing.model.num_accepted > 0
        assert guessing.model.num_rejected > 0
        talk += answer.tokens
        num_stored = (len(talk) - 1) // BLOCK * BLOCK
        talk += [turn]
        reader = start(store=store)
        assert serve(reader, talk).computed_prompt_tokens == len(talk) - num_stored
        assert "blocks/failed" not in reader.counts


def test_speculating_engines_preempt_and_load(start: StartEngine) -> None:
    prompts = [[number, *LONG[:9]] for number in range(6)]
    for _ in range(2):
        engine = start(model=GuessingModel, num_blocks=24, store=chunked(2), **SPECULATING)
        requests = [make_request(f"r{number}", prompt, 20) for number, prompt in enumerate(prompts)]
        for prompt, answer in zip(prompts, engine.run(*requests), strict=True):
            assert answer.tokens == expected_answer(prompt, 20)
        assert any(request.num_preemptions for request in requests)
    assert engine.counts["tokens/loaded"] > 0, "blocks that the first engine stored"


# --- resets and blocks that change hands ---


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("resets_connector", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_prefix_cache_reset_during_requests_keeps_tokens_right(
    start: StartEngine, is_async: bool, resets_connector: bool, runner: RunnerName
) -> None:
    engine = start(runner=runner, is_async=is_async, store=chunked(3), num_blocks=128)
    prompts = [[number, *LONG[: 20 + number]] for number in range(5)]
    requests = [make_request(f"r{number}", prompt, 30) for number, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    for num_tokens in (3, 8, 14, 21):
        spin(engine, partial(has_said, engine, "r4", num_tokens), "no tokens")
        spin(engine, lambda: not is_loading(requests), "a load never ends")
        engine.update_all()  # vLLM refuses while a step in flight may write to freed blocks
        assert engine.scheduler.reset_prefix_cache(True, resets_connector)
    engine.run_out()
    check_all(engine, prompts, 30)
    reader = start(store=chunked(3))
    for number, prompt in enumerate(prompts):
        assert serve(reader, prompt, name=f"warm{number}").computed_prompt_tokens == 1


def has_said(engine: ToyEngine, name: str, num_tokens: int) -> bool:
    return len(engine.answers[name].tokens) >= num_tokens


def is_loading(requests: list[Request]) -> bool:
    """Return whether a request loads; vLLM cannot reset its cache meanwhile."""
    return any(request.status is RequestStatus.WAITING_FOR_REMOTE_KVS for request in requests)


def check_all(engine: ToyEngine, prompts: list[list[int]], num_tokens: int) -> None:
    for number, prompt in enumerate(prompts):
        assert engine.answers[f"r{number}"].tokens == expected_answer(prompt, num_tokens)


@pytest.mark.parametrize("is_async", [False, True])
def test_request_aborted_after_a_reset_saves_no_foreign_blocks(
    start: StartEngine, tmp_path: Path, is_async: bool
) -> None:
    """Other requests got its blocks long before it ended."""
    engine = start(is_async=is_async, store=chunked(8), num_blocks=10, max_num_seqs=1)
    victim = make_request("victim", LONG[:7], 20)
    engine.add(victim)
    spin(engine, partial(has_said, engine, "victim", 6), "no tokens")
    engine.update_all()
    assert engine.scheduler.reset_prefix_cache(True, True)
    other = [7, *LONG[:22]]
    engine.scheduler.waiting.remove_request(victim)
    engine.add(make_request("r0", other, 9))
    spin(engine, partial(has_said, engine, "r0", 5), "no tokens")
    engine.scheduler.waiting.add_request(victim)
    engine.abort("victim")
    engine.run_out()
    check_all(engine, [other], 9)
    said = [*LONG[:7], *expected_answer(LONG[:7], 12)]
    assert serve(start(store=chunked(8)), said).computed_prompt_tokens <= len(said)


def test_slow_save_stores_the_blocks_as_they_were_when_ordered(
    start: StartEngine, tmp_path: Path
) -> None:
    """Blocks are refilled many times before the slow store has taken the saves."""
    with slow_store(tmp_path) as store:
        engine = start(num_blocks=12, store=store | chunked(2), max_num_seqs=1)
        prompts = [[number, *LONG[: 21 + number]] for number in range(8)]
        GatedFileSystem.close_gate("put")
        for number, prompt in enumerate(prompts):
            engine.add(make_request(f"r{number}", prompt, 9))
        spin(engine, lambda: not engine.scheduler.has_requests(), "no answer")
        assert engine.transfer.in_flight > 8
        GatedFileSystem.open_gates()
        engine.run_out()
        check_all(engine, prompts, 9)
        reader = start(store=store | chunked(2) | {"host_cache_dir": f"{tmp_path}/elsewhere"})
        for number, prompt in enumerate(prompts):
            said = [*prompt, *expected_answer(prompt, 9)]
            answer = serve(reader, said, name=f"warm{number}")
            assert answer.computed_prompt_tokens == len(said) - (len(said) - 1) // BLOCK * BLOCK


@contextmanager
def slow_store(tmp_path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield {"url": "gated://bucket", "host_cache_dir": f"{tmp_path}/host"}
    finally:
        GatedFileSystem.reset()


# --- sharing between requests ---


def test_prompts_with_different_cache_salts_do_not_share(
    start: StartEngine, tmp_path: Path
) -> None:
    def ask(salt: str | None) -> Answer:
        (answer,) = start(store=chunked(3)).run(make_request("r", LONG, 3, cache_salt=salt))
        assert answer.tokens == expected_answer(LONG, 3)
        return answer

    for salt in ("one", "two", None):
        assert ask(salt).computed_prompt_tokens == len(LONG)
        assert ask(salt).computed_prompt_tokens == 1
    assert len(objects(tmp_path)) % 3 == 0


@pytest.mark.parametrize("num_local", [0, 2, 9])
@pytest.mark.parametrize("num_stored", [6, 13])
def test_longer_of_local_and_stored_hit_is_used(
    start: StartEngine, num_local: int, num_stored: int
) -> None:
    store = chunked(4)
    engine = start(store=store)
    if num_local:
        serve(engine, [*LONG[: num_local * BLOCK], 1], max_tokens=1, name="local")
    if num_stored > num_local:
        serve(start(store=store), LONG[: num_stored * BLOCK], max_tokens=1)
    answer = serve(engine, LONG, name="both")
    assert answer.computed_prompt_tokens == len(LONG) - max(num_local, num_stored) * BLOCK


def test_abort_and_reset_leave_blocks_shared_with_others_intact(start: StartEngine) -> None:
    """One is aborted, one preempted by a reset, while others read the same blocks."""
    serve(start(store=chunked(2)), LONG)
    engine = start(store=chunked(2), num_blocks=128)
    prompts = [[*LONG[: 8 * BLOCK + number], number] for number in range(6)]
    for number, prompt in enumerate(prompts):
        engine.add(make_request(f"r{number}", prompt, 12))
    # vLLM refuses a reset while a request waits for its load.
    for number in range(len(prompts)):
        spin(engine, partial(has_said, engine, f"r{number}", 1), "no tokens")
    engine.abort("r0")
    engine.step()
    assert engine.scheduler.reset_prefix_cache(True, False)
    engine.run_out()
    for number, prompt in list(enumerate(prompts))[1:]:
        assert engine.answers[f"r{number}"].tokens == expected_answer(prompt, 12)


# --- blocks that vLLM zeroes ---


@pytest.mark.parametrize("runner", RUNNERS)
def test_blocks_zeroed_before_their_save_are_not_stored(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runner: RunnerName
) -> None:
    """vLLM zeroes caches of mixed precision; V2 runners do so before a connector copies blocks."""
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
    engine = start(num_blocks=12, store=chunked(2), max_num_seqs=1, runner=runner)
    prompts = [[number, *LONG[: 21 + number]] for number in range(8)]
    for number, prompt in enumerate(prompts):
        engine.add(make_request(f"r{number}", prompt, 9))
    engine.run_out()
    reader = start(store=chunked(2) | {"host_cache_dir": f"{tmp_path}/elsewhere"})
    for number, prompt in enumerate(prompts):
        said = [*prompt, *expected_answer(prompt, 9)]
        serve(reader, said, name=f"r{number}")  # compares its tokens


# --- sleep ---


def test_engine_finds_its_prompts_in_the_store_after_sleep(start: StartEngine) -> None:
    engine = start()
    transfer = engine.config.kv_transfer_config
    assert KVShareConnector.supports_sleep_mode(transfer), "vLLM would not start with sleep mode"
    serve(engine, LONG)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    sleep_and_wake(engine)
    assert serve(engine, LONG, name="again").computed_prompt_tokens == 1


def test_request_loading_during_sleep_is_computed(gated: StartEngine) -> None:
    serve(gated(), LONG)
    engine = gated()
    GatedFileSystem.close_gate("get")
    engine.add(make_request("r", LONG, 3))
    spin(engine, lambda: engine.counts.get("tokens/hit", 0) > 0, "nothing is found")
    sleep_and_wake(engine)
    GatedFileSystem.open_gates()
    engine.run_out()
    assert engine.answers["r"].tokens == expected_answer(LONG, 3)
    assert engine.answers["r"].computed_prompt_tokens == len(LONG)
    assert is_at_rest(engine)
