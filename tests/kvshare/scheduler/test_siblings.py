# SPDX-License-Identifier: Apache-2.0
"""Beside another connector, below a real MultiConnector: its KV never gets into the store."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request

from kvshare.scheduler.siblings import Siblings
from lab.vllm_loop import RUNNERS, RunnerName
from tests.kvshare.conftest import StartEngine, is_at_rest, spin
from tests.kvshare.gated import GatedFileSystem
from tests.kvshare.toy import (
    BLOCK,
    TOLD,
    Answer,
    ToyEngine,
    expected_answer,
    make_request,
    objects,
    serve,
    spec,
    window,
)
from tests.nightly import gate_tries
from tests.sibling import from_prefiller

LONG = list(range(100, 100 + 5 * BLOCK + 3))
NUM_CHUNKS = 6  # blocks, and the tail

SPECS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (spec(),),
    "window": (window(2 * BLOCK),),
    "both": (spec(), window(2 * BLOCK)),
}

BOTH_ORDERS = pytest.mark.parametrize("is_behind", [False, True])
SYNC_AND_ASYNC = pytest.mark.parametrize("is_async", [False, True])


def ask(
    engine: ToyEngine, prompt: list[int], max_tokens: int = 3, name: str = "asked", **params: Any
) -> Answer:
    """Serve a request that the sibling loads, without checking its tokens."""
    said = TOLD | from_prefiller(**params)
    request = make_request(name, prompt, max_tokens, kv_transfer_params=said)
    (answer,) = engine.run(request)
    return answer


def num_stored(start: StartEngine, prompt: list[int]) -> int:
    """Return how many tokens of `prompt` an engine without siblings loads."""
    return len(prompt) - serve(start(), prompt).computed_prompt_tokens


@BOTH_ORDERS
@SYNC_AND_ASYNC
@pytest.mark.parametrize("runner", RUNNERS)
def test_kv_loaded_by_a_sibling_is_not_stored(
    start: StartEngine, tmp_path: Path, runner: RunnerName, *, is_async: bool, is_behind: bool
) -> None:
    engine = start(sibling={"is_async": is_async, "is_behind": is_behind}, runner=runner)
    answer = ask(engine, LONG, 3 * BLOCK)
    assert answer.computed_prompt_tokens == 1
    assert answer.tokens != expected_answer(LONG, 3 * BLOCK), "the KV is wrong"
    assert answer.kv_transfer_params is None, "nothing is announced"
    assert objects(tmp_path) == [], "blocks computed on top of it are not stored either"
    assert engine.counts["declined/other_connector"] == 5 + 1 + 3
    assert num_stored(start, LONG) == 0


@BOTH_ORDERS
def test_right_kv_loaded_by_a_sibling_is_not_stored_either(
    start: StartEngine, tmp_path: Path, *, is_behind: bool
) -> None:
    engine = start(sibling={"is_right": True, "is_behind": is_behind})
    answer = ask(engine, LONG, 3 * BLOCK)
    assert answer.tokens == expected_answer(LONG, 3 * BLOCK)
    assert objects(tmp_path) == [], "kvshare has not verified it"


@pytest.mark.parametrize("kind", SPECS)
def test_local_hits_of_a_siblings_kv_are_not_stored(
    start: StartEngine, tmp_path: Path, kind: str
) -> None:
    engine = start(sibling={}, specs=SPECS[kind])
    answer = ask(engine, LONG, 4 * BLOCK)
    prompts = [[*LONG, *answer.tokens, 1, 2]]
    if kind == "full":  # vLLM has freed the blocks behind a window
        prompts += [LONG, [*LONG, 7, 8, 9, 10]]
    for number, prompt in enumerate(prompts):
        (later,) = engine.run(make_request(f"later-{number}", prompt, 2 * BLOCK))
        assert later.computed_prompt_tokens < 2 * BLOCK
        assert later.kv_transfer_params is None
    assert objects(tmp_path) == []


@pytest.mark.parametrize("resets", [True, False])
def test_prompt_is_stored_once_the_engine_computed_it_itself(
    start: StartEngine, *, resets: bool
) -> None:
    engine = start(sibling={}, num_blocks=12, max_num_batched_tokens=8)
    ask(engine, LONG)
    if resets:
        assert engine.scheduler.reset_prefix_cache()
    else:  # other prompts have taken its blocks
        serve(engine, list(range(500, 500 + 10 * BLOCK)), name="other")
    assert serve(engine, LONG, name="later").computed_prompt_tokens == len(LONG)
    longer = [*LONG, *range(900, 900 + BLOCK)]
    assert serve(engine, longer, name="longer").computed_prompt_tokens == BLOCK + 3
    assert num_stored(start, longer) == len(longer) - 1


@SYNC_AND_ASYNC
def test_blocks_computed_before_the_siblings_load_are_stored(
    start: StartEngine, tmp_path: Path, *, is_async: bool
) -> None:
    engine = start(sibling={"is_async": is_async})
    unsaved = {"kvshare_save": False}
    engine.run(make_request("own", LONG[: 2 * BLOCK], 2, kv_transfer_params=unsaved))
    assert objects(tmp_path) == []
    answer = ask(engine, LONG)
    assert answer.kv_transfer_params == {"kvshare": {"num_tokens": 2 * BLOCK, "size": 1}}
    assert num_stored(start, LONG) == 2 * BLOCK


def test_other_prompts_beside_a_sibling_are_stored(start: StartEngine) -> None:
    engine = start(sibling={})
    ask(engine, LONG)
    other = list(range(500, 500 + 5 * BLOCK))
    serve(engine, other, name="other")
    assert num_stored(start, other) == len(other) - 1


@BOTH_ORDERS
@pytest.mark.parametrize(
    ("fails", "is_async"), [("request", True), ("blocks", True), ("blocks", False)]
)
@pytest.mark.parametrize("local_blocks", [0, 2])
def test_prompt_is_computed_and_stored_after_a_sibling_failed(
    start: StartEngine, fails: str, local_blocks: int, *, is_async: bool, is_behind: bool
) -> None:
    engine = start(sibling={"is_async": is_async, "is_behind": is_behind})
    if local_blocks:
        serve(engine, LONG[: local_blocks * BLOCK], max_tokens=1, name="own")
    answer = ask(engine, LONG, fails=fails)
    assert answer.tokens == expected_answer(LONG, 3)
    if is_async:
        assert num_stored(start, LONG) == len(LONG) - 1


@BOTH_ORDERS
def test_prompt_is_loaded_from_the_store_after_a_sibling_failed(
    start: StartEngine, *, is_behind: bool
) -> None:
    serve(start(), LONG)
    engine = start(sibling={"is_behind": is_behind})
    answer = ask(engine, LONG, fails="request")
    assert answer.tokens == expected_answer(LONG, 3)
    assert answer.computed_prompt_tokens == 1
    assert engine.counts["tokens/loaded"] == len(LONG) - 1


def test_prompt_is_computed_if_blocks_are_short_after_a_sibling_failed(start: StartEngine) -> None:
    """vLLM reserves the blocks of a failed load. If blocks are few, a second load of the request
    would never be admitted, nor would requests queued behind it."""
    serve(start(), LONG)
    engine = start(sibling={}, num_blocks=10)
    answer = ask(engine, LONG, fails="request")
    assert answer.tokens == expected_answer(LONG, 3)
    assert answer.computed_prompt_tokens == len(LONG)


@BOTH_ORDERS
def test_prompt_is_computed_if_blocks_are_short_after_a_sibling_failed_before_a_reset(
    gated: StartEngine, *, is_behind: bool
) -> None:
    """vLLM still reserves the blocks, although all that is known of its cache is void."""
    serve(gated(), LONG)
    engine = gated(engine={"sibling": {"is_behind": is_behind}, "num_blocks": 10})
    GatedFileSystem.close_gate("exists")
    engine.add(failing("asked", LONG))
    spin(engine, partial(is_looked_up, engine, "asked"), "no look-up")
    engine.update_all()
    assert engine.scheduler.reset_prefix_cache()
    GatedFileSystem.open_gates()
    engine.run_out()
    assert engine.answers["asked"].tokens == expected_answer(LONG, 3)
    assert engine.answers["asked"].computed_prompt_tokens == len(LONG)
    assert is_at_rest(engine)


@pytest.mark.parametrize("is_async", [False, True])
def test_preempted_request_waits_for_blocks_reserved_behind_it(
    gated: StartEngine, *, is_async: bool
) -> None:
    """vLLM asks first about the preempted request. If that was offered a load that does not fit
    beside the reserved blocks, none of the two would ever be admitted."""
    engine = gated(engine={"sibling": {}, "num_blocks": 10, "is_async": is_async})
    engine.add(make_request("first", LONG[: 2 * BLOCK], 4 * BLOCK))
    spin(engine, lambda: bool(engine.answers["first"].tokens), "no tokens")
    GatedFileSystem.close_gate("exists")
    engine.add(failing("behind", [1, *LONG]))
    spin(engine, partial(is_looked_up, engine, "behind"), "no look-up")
    spin(engine, lambda: len(engine.answers["first"].tokens) > 3 * BLOCK, "no tokens")
    engine.update_all()
    engine.transfer.wait_idle()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    GatedFileSystem.open_gates()
    engine.run_out()
    assert engine.answers["first"].tokens == expected_answer(LONG[: 2 * BLOCK], 4 * BLOCK)
    assert engine.answers["behind"].tokens == expected_answer([1, *LONG], 3)
    assert is_at_rest(engine)


def failing(name: str, prompt: list[int]) -> Request:
    """Make a request whose load by the sibling fails as a whole."""
    said = TOLD | from_prefiller(fails="request")
    return make_request(name, prompt, 3, kv_transfer_params=said)


def is_looked_up(engine: ToyEngine, name: str) -> bool:
    """Return whether the request waits for a look-up in the store."""
    tracked = engine.connector.scheduler._tracked.get(name)
    return tracked is not None and tracked.lookup is not None and not tracked.lookup.is_over


def test_blocks_computed_after_a_siblings_partial_load_are_not_stored(
    start: StartEngine, tmp_path: Path
) -> None:
    engine = start(sibling={})
    ask(engine, LONG, tokens=2 * BLOCK)
    assert objects(tmp_path) == [], "the rest was computed on top of it"


@BOTH_ORDERS
def test_request_naming_a_siblings_source_is_not_looked_up(
    gated: StartEngine, *, is_behind: bool
) -> None:
    engine = gated(engine={"sibling": {"is_right": True, "is_behind": is_behind}})
    GatedFileSystem.close_gate("exists", "get")
    for name in ("one", "two"):
        prompt = [ord(name[0]), *LONG]
        assert ask(engine, prompt, name=name).tokens == expected_answer(prompt, 3)
    assert "tokens/queried" not in engine.counts
    assert "wait_seconds/look_up" not in engine.counts


def test_source_params_without_a_sibling_skip_only_the_first_load(
    start: StartEngine,
) -> None:
    """The first is computed, because only then is it known that no sibling loads it."""
    prompts = [[number, *LONG] for number in range(3)]
    for prompt in prompts:
        serve(start(), prompt)
    engine = start()
    computed = [ask(engine, each, name=str(each[0])).computed_prompt_tokens for each in prompts]
    assert computed == [len(LONG) + 1, 1, 1]


@pytest.mark.parametrize("is_async", [False, True])
def test_preempted_request_is_checked_again_for_foreign_blocks(
    start: StartEngine, *, is_async: bool
) -> None:
    """Its second admission finds other blocks in the local cache than its first."""
    engine = start("kv_producer", sibling={}, num_blocks=14, is_async=is_async, max_num_seqs=2)
    prompts = [[number, *LONG] for number in range(2)]
    taken = make_request("taken", prompts[0], 20, kv_transfer_params=from_prefiller())
    own = make_request("own", prompts[1], 20)
    answers = engine.run(taken, own)
    assert taken.num_preemptions or own.num_preemptions
    assert answers[1].tokens == expected_answer(prompts[1], 20)
    assert is_at_rest(engine)
    for prompt in prompts:
        serve(start(), prompt, max_tokens=20)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("brings", ["named", "always"])
@pytest.mark.parametrize("is_async", gate_tries(True, False))
def test_random_sibling_loads_never_reach_other_engines(
    start: StartEngine, kind: str, brings: str, *, is_async: bool
) -> None:
    """Prompts share prefixes, blocks are few, and loads fail: the local cache holds a sibling's
    wrong KV beside right KV, sometimes under the same hashes."""
    chance = random.Random(f"{kind} {brings} {is_async}")
    store = {"chunk_tokens": 2 * BLOCK}
    engine = start(
        sibling={"is_async": is_async, "brings": brings, "is_behind": chance.random() < 0.5},
        store=store,
        specs=SPECS[kind],
        num_blocks=40,
        is_async=chance.random() < 0.5,
        max_num_seqs=3,
    )
    prompts: list[list[int]] = []
    names: list[str] = []
    for number in range(12):
        for each in range(4):
            prompt = [*range(100, 100 + chance.randrange(1, 24))]
            if prompts and chance.random() < 0.3:  # a conversation continues
                earlier = chance.randrange(len(prompts))
                prompt = [*prompts[earlier], *engine.answers[names[earlier]].tokens]
            prompt += [chance.randrange(3)] * chance.randrange(1, 8)
            prompts.append(prompt)
            names.append(f"{number}-{each}")
            fails = chance.choice(["", "", "request" if is_async else ""])
            if len(SPECS[kind]) == 1 and kind == "full":
                fails = chance.choice([fails, "blocks"])
            params = from_prefiller(tokens=chance.randrange(len(prompt)), fails=fails)
            request = make_request(
                names[-1],
                prompt,
                chance.randrange(1, 14),
                kv_transfer_params=params if chance.random() < 0.4 else None,
            )
            engine.add(request)
        engine.run_out()
    assert is_at_rest(engine)
    if brings == "named":
        assert engine.counts["blocks/saved"] > 0
    reader = start("kv_consumer", store=store, specs=SPECS[kind], num_blocks=200)
    for number, prompt in enumerate(prompts):
        serve(reader, [*prompt, 77], name=f"read-{number}", max_tokens=8)
    if brings == "named":
        assert reader.counts["tokens/loaded"] > 0


def test_blocks_are_not_tracked_without_siblings(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(Siblings, "_record", lambda *_args, **_more: seen.append(1))
    monkeypatch.setattr(Siblings, "_first_foreign", lambda *_args: seen.append(1))
    engine = start()
    serve(engine, LONG, name="one")
    serve(engine, LONG, max_tokens=2 * BLOCK, name="two")
    serve(start(), LONG)
    assert not seen
