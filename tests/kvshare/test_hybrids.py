# SPDX-License-Identifier: Apache-2.0
"""The toy engine plays models with recurrent layers as vLLM does, with any connector or none."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import KVTransferConfig
from vllm.v1.request import Request

from lab.vllm_loop import RUNNERS
from tests.kvshare.offers import Offer, Recorder
from tests.kvshare.toy import (
    BLOCK,
    LAYERS,
    BareEngine,
    cache_config,
    engine_config,
    expected_answer,
    hybrid,
    make_request,
    state_of,
)
from tests.nightly import gate_tries
from tests.releases import needs_offered_states
from tests.sibling import from_prefiller

pytestmark = needs_offered_states

StartBare = Callable[..., BareEngine]

LONG = list(range(100, 100 + 13 * BLOCK + 3))
TINY = 16 + 2 * 4  # blocks: of the longest request's attention layers, and of its states


def recorder(**sibling: Any) -> KVTransferConfig:
    """Configure a `Recorder` that loads right states, with more options of a sibling."""
    return KVTransferConfig(
        kv_connector="Recorder",
        kv_connector_module_path="tests.kvshare.offers",
        kv_role="kv_both",
        kv_connector_extra_config={"is_right": True} | sibling,
    )


@pytest.fixture(params=[(runner, is_async) for runner in RUNNERS for is_async in (False, True)])
def start_bare(request: pytest.FixtureRequest, text_model: Path) -> Iterator[StartBare]:
    """Start engines with two groups of recurrent layers, on each runner, with and without
    asynchronous scheduling."""
    runner, is_async = request.param
    with _starting(text_model, runner=runner, is_async=is_async) as start:
        yield start


@contextmanager
def _starting(model: Path, **mode: Any) -> Iterator[StartBare]:
    started: list[BareEngine] = []

    def start(
        transfer: KVTransferConfig | None = None,
        *,
        num_blocks: int = 100,
        num_recurrent: int = 2,
        **engine_args: Any,
    ) -> BareEngine:
        config = engine_config(model, transfer, **engine_args)
        engine = BareEngine(config, num_blocks=num_blocks, specs=hybrid(num_recurrent), **mode)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()


def ask(
    engine: BareEngine, *prompts: Sequence[int], max_tokens: int = 9, params: Any = None
) -> list[Request]:
    """Serve requests together and check their tokens."""
    first = len(engine.answers)
    requests = [
        make_request(f"r{first + number}", prompt, max_tokens, kv_transfer_params=params)
        for number, prompt in enumerate(prompts)
    ]
    answers = engine.run(*requests)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == expected_answer(prompt, max_tokens, engine.windows)
    return requests


def computed(engine: BareEngine, request: Request) -> int:
    return engine.answers[request.request_id].computed_prompt_tokens


def offers(engine: BareEngine, *requests: Request) -> list[list[Offer]]:
    """Return the offers of each step that has some, once each is checked."""
    recorder = engine.runners[0].kv_connector
    assert isinstance(recorder, Recorder)
    tokens = {each.request_id: list(each.all_token_ids) for each in requests}
    for offer in (each for step in recorder.steps for each in step):
        before = tokens[offer.request_id][: offer.num_tokens]
        assert len(before) == offer.num_tokens, "a state of tokens that are not known"
        right = [state_of(before, offer.group, layer) for layer in range(LAYERS)]
        assert offer.states == right, offer
    return [step for step in recorder.steps if step]


def places(steps: list[list[Offer]]) -> list[tuple[int, int]]:
    """Return group and number of tokens of each offer."""
    return [(each.group, each.num_tokens) for step in steps for each in step]


# --- tokens ---


def test_caches_lie_as_vllm_allocates_them(text_model: Path) -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    cache = cache_config(8, hybrid())
    right = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout.LBHNC)
    with _starting(text_model) as start:
        own = start(num_blocks=8, num_recurrent=1).model.kv_caches
    assert own.keys() == right.keys()
    assert {name: _place(own, name) for name in own} == {
        name: _place(right, name) for name in right
    }


def _place(caches: dict[str, Tensor], name: str) -> tuple[Any, ...]:
    cache, storage = caches[name], caches[name].untyped_storage().data_ptr()
    return cache.dtype, cache.shape, cache.data_ptr() - storage, cache.stride(0)


@pytest.mark.parametrize("num_recurrent", [1, 2, 3])
def test_cold_hybrid_answers_rightly(start_bare: StartBare, num_recurrent: int) -> None:
    engine = start_bare(num_recurrent=num_recurrent)
    ask(engine, *(LONG[number : 2 * number + 1] for number in range(3 * BLOCK)))


def test_hybrid_continues_from_vllms_own_cached_states(start_bare: StartBare) -> None:
    engine = start_bare()
    (cold,) = ask(engine, LONG)
    (again,) = ask(engine, [*LONG, *cold.output_token_ids, 7])
    assert computed(engine, cold) == len(LONG)
    assert computed(engine, again) <= 2 * BLOCK, "the state at the end of the answer is cached"
    (parted,) = ask(engine, [*LONG[:-2], 7])
    assert computed(engine, parted) == len(parted.prompt_token_ids or ()) - 13 * BLOCK


def test_hybrid_computes_prompts_in_chunks(start_bare: StartBare) -> None:
    engine = start_bare(max_num_batched_tokens=10, max_num_seqs=4)
    for turn in range(2):
        ask(engine, *([turn, number, *LONG[number:]] for number in range(4)))
        ask(engine, *([turn, number, *LONG[number:], 7] for number in range(4)))


def test_hybrid_preempts_and_resumes(start_bare: StartBare) -> None:
    engine = start_bare(num_blocks=40)
    requests = ask(engine, *([number, *LONG[:9]] for number in range(6)), max_tokens=20)
    assert any(each.num_preemptions for each in requests)


def test_hybrid_serves_from_a_tiny_cache(start_bare: StartBare) -> None:
    engine = start_bare(num_blocks=TINY)
    for number in range(4):
        ask(engine, [number, *LONG], LONG[: 3 * number + 1], [0, *LONG], max_tokens=5)


def test_hybrid_survives_a_forced_reset_of_the_prefix_cache(start_bare: StartBare) -> None:
    engine = start_bare()
    requests = [make_request(f"r{number}", [number, *LONG[:9]], 20) for number in range(3)]
    for request in requests:
        engine.add(request)
    for number in range(30):
        engine.step()
        if number % 4 == 3:
            _reset(engine)
    engine.run_out()
    for request in requests:
        right = expected_answer(request.prompt_token_ids or (), 20, engine.windows)
        assert engine.answers[request.request_id].tokens == right
    assert any(each.num_preemptions for each in requests)


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_lost_state_gives_wrong_tokens(start_bare: StartBare, group: int, layer: int) -> None:
    engine = start_bare()
    request = make_request("r", LONG, 6)
    engine.add(request)
    while request.num_output_tokens < 2:
        engine.step()
    engine.update_all()
    ids = engine.scheduler.kv_cache_manager.get_block_ids("r")[group]
    name = engine.scheduler.kv_cache_config.kv_cache_groups[group].layer_names[layer]
    engine.model.kv_caches[name][[each for each in ids if each]] = 0
    engine.run_out()
    right = expected_answer(LONG, 6, engine.windows)
    given = engine.answers["r"].tokens
    assert given[:2] == right[:2]
    assert given != right


def test_hybrid_goes_on_from_a_loaded_state(start_bare: StartBare) -> None:
    """A connector writes the state to the only block of the group that is not a placeholder."""
    engine = start_bare(recorder())
    for end in (BLOCK, 5 * BLOCK, 13 * BLOCK):
        params = from_prefiller(tokens=end)
        (request,) = ask(engine, [end, *LONG[1:]], params=params)
        assert computed(engine, request) == len(LONG) - end


@pytest.mark.parametrize(
    ("num_tokens", "is_async"),
    [
        pytest.param(13 * BLOCK, False, id="the load starts after the copy of states"),
        pytest.param(len(LONG) + 1, True, id="the last token is computed again"),
    ],
)
def test_hybrid_goes_wrong_after_loads_that_vllm_cannot_use(
    start_bare: StartBare, num_tokens: int, is_async: bool
) -> None:
    engine = start_bare(recorder(is_async=is_async))
    prompt = [*LONG, 7]
    params = from_prefiller(tokens=num_tokens)
    (answer,) = engine.run(make_request("r", prompt, kv_transfer_params=params))
    assert answer.computed_prompt_tokens == max(1, len(prompt) - num_tokens)
    assert answer.tokens != expected_answer(prompt, 1, engine.windows)


# --- states that vLLM offers to connectors ---


def is_async(engine: BareEngine) -> bool:
    return bool(engine.config.scheduler_config.async_scheduling)


def test_prompt_and_answer_offer_a_state_of_each_group_at_each_boundary_of_steps(
    start_bare: StartBare,
) -> None:
    """The prompt's last whole block ends a step, and so does every block of the answer."""
    engine = start_bare(recorder())
    (request,) = ask(engine, LONG[: 2 * BLOCK + 2], max_tokens=9)
    steps = offers(engine, request)
    assert [places([step]) for step in steps] == [
        [(0, end), (1, end)] for end in (2 * BLOCK, 3 * BLOCK, 4 * BLOCK)
    ]


def test_prompt_of_whole_blocks_also_offers_the_boundary_before_its_last_block(
    start_bare: StartBare,
) -> None:
    engine = start_bare(recorder(), num_recurrent=1)
    (request,) = ask(engine, LONG[: 4 * BLOCK], max_tokens=1)
    assert places(offers(engine, request)) == [(0, 3 * BLOCK), (0, 4 * BLOCK)]


def test_prompt_in_chunks_offers_the_end_of_each(start_bare: StartBare) -> None:
    engine = start_bare(recorder(), num_recurrent=1, max_num_batched_tokens=2 * BLOCK + 2)
    (request,) = ask(engine, LONG[: 7 * BLOCK + 1], max_tokens=1)
    ends = [2 * BLOCK, 4 * BLOCK, 6 * BLOCK, 7 * BLOCK]
    assert places(offers(engine, request)) == [(0, end) for end in ends]


def test_answer_that_ends_on_a_boundary_offers_it_only_without_asynchronous_scheduling(
    start_bare: StartBare,
) -> None:
    """Of a token that is not known yet vLLM has no hash: it offers that boundary a step later."""
    engine = start_bare(recorder(), num_recurrent=1)
    (request,) = ask(engine, LONG[: 2 * BLOCK + 2], max_tokens=3)
    ends = [2 * BLOCK, *([] if is_async(engine) else [3 * BLOCK])]
    assert places(offers(engine, request)) == [(0, end) for end in ends]


def test_state_that_vllm_had_cached_is_not_offered_again(start_bare: StartBare) -> None:
    engine = start_bare(recorder(), num_recurrent=1)
    requests = [request for _ in range(2) for request in ask(engine, LONG, max_tokens=1)]
    assert computed(engine, requests[1]) < BLOCK
    assert places(offers(engine, *requests)) == [(0, 13 * BLOCK)]


def test_resumed_requests_offer_boundaries_again(start_bare: StartBare) -> None:
    engine = start_bare(recorder(), num_blocks=40)
    requests = ask(engine, *([number, *LONG[:9]] for number in range(6)), max_tokens=20)
    assert any(each.num_preemptions for each in requests)
    named = [each[:2] + each[3:4] for step in offers(engine, *requests) for each in step]
    assert len(named) > len(set(named))


def test_loaded_state_is_offered_even_while_its_request_waits(start_bare: StartBare) -> None:
    engine = start_bare(recorder(), num_recurrent=1, max_num_batched_tokens=2 * BLOCK + 1)
    params = from_prefiller(tokens=2 * BLOCK)
    busy = make_request("busy", LONG, kv_transfer_params={})
    loading = make_request("loading", [1, *LONG[:14]], kv_transfer_params=params)
    engine.run(busy, loading)
    of_loaded = [
        each
        for step in offers(engine, busy, loading)
        for each in step
        if each.request_id == "loading"
    ]
    assert places([of_loaded]) == [(0, 2 * BLOCK), (0, 3 * BLOCK)]
    assert [each.is_scheduled for each in of_loaded] == [False, True]


@pytest.mark.parametrize("seed", gate_tries(*range(2)))
def test_every_offered_block_holds_the_state_of_its_tokens(
    start_bare: StartBare, seed: int
) -> None:
    dice = Random(seed)
    engine = start_bare(recorder(), num_blocks=60, max_num_batched_tokens=24, max_num_seqs=8)
    prompts = [[dice.randrange(6) for _ in range(dice.randrange(2, 50))] for _ in range(5)]
    requests: list[Request] = []
    for _ in range(200):
        live = [each for each in requests if not each.is_finished()]
        event = dice.random()
        if event < 0.2 and len(live) < 6:
            words = [*dice.choice(prompts)[: dice.randrange(1, 50)], dice.randrange(6)]
            load = from_prefiller(tokens=dice.randrange(len(words)) // BLOCK * BLOCK)
            params = dice.choice([{}, load])
            name = f"r{len(requests)}"
            requests.append(
                make_request(name, words, dice.randrange(1, 24), kv_transfer_params=params)
            )
            engine.add(requests[-1])
        elif event < 0.22 and live:
            engine.abort(dice.choice(live).request_id)
        elif event < 0.24:
            _reset(engine)
        elif engine.has_work:
            engine.step()
    engine.run_out()
    for request in requests:
        tokens = engine.answers[request.request_id].tokens
        right = expected_answer(request.prompt_token_ids or (), len(tokens), engine.windows)
        assert tokens == right
    assert len(offers(engine, *requests)) > 20


def _reset(engine: BareEngine) -> None:
    with suppress(RuntimeError):  # vLLM refuses while it loads
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
