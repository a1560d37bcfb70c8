# SPDX-License-Identifier: Apache-2.0
"""Engines with recurrent layers, without our connector: the toy engine plays them as vLLM does."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from lab.vllm_loop import RUNNERS
from tests.kvshare.offers import Offer, Recorder
from tests.kvshare.toy import (
    BLOCK,
    LAYERS,
    STATE_BYTES,
    Answer,
    BareEngine,
    cache_config,
    engine_config,
    expected_answer,
    hybrid,
    make_request,
    spec,
    state_of,
    write_state,
)
from tests.sibling import from_prefiller

LONG = list(range(100, 100 + 13 * BLOCK + 3))
RECORDER = KVTransferConfig(
    kv_connector="Recorder",
    kv_connector_module_path="tests.kvshare.offers",
    kv_role="kv_both",
    kv_connector_extra_config={"is_right": True},
)
MODES = [(runner, is_async) for runner in RUNNERS for is_async in (False, True)]
every_mode = pytest.mark.parametrize(("runner", "is_async"), MODES)


@contextmanager
def started(
    model: Path, transfer: KVTransferConfig | None = None, num_recurrent: int = 2, **more: Any
) -> Iterator[BareEngine]:
    """Start an engine; `more`: arguments of `BareEngine` and, as `config`, of vLLM."""
    config = engine_config(model, transfer, **more.pop("config", {}))
    engine = BareEngine(config, specs=hybrid(num_recurrent), **more)
    try:
        yield engine
    finally:
        engine.close()


def ask(engine: BareEngine, prompt: Sequence[int], max_tokens: int = 9, **params: Any) -> Answer:
    """Serve one request and check its tokens."""
    name = f"r{len(engine.answers)}"
    request = make_request(name, prompt, max_tokens, kv_transfer_params=params or None)
    (answer,) = engine.run(request)
    assert answer.tokens == expected_answer(prompt, max_tokens, engine.windows)
    return answer


def offers_of(engine: BareEngine) -> list[list[Offer]]:
    """Return the offers of each step, once each is checked against its request's tokens."""
    recorder = engine.runners[0].kv_connector
    assert isinstance(recorder, Recorder)
    for offer in (each for step in recorder.steps for each in step):
        tokens = engine.model_tokens[offer.request_id][: offer.num_tokens]
        assert len(tokens) == offer.num_tokens
        right = [state_of(tokens, offer.group, layer) for layer in range(LAYERS)]
        assert offer.states == right, offer
    return recorder.steps


# --- the cache ---


def test_caches_lie_as_vllm_allocates_them(text_model: Path) -> None:
    from vllm.v1.kv_cache_interface import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    cache = cache_config(8, hybrid(2))
    right = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout.LBHNC)
    with started(text_model, num_blocks=8) as engine:
        ours = engine.model.kv_caches
        assert ours.keys() == right.keys()
        places = [{name: place_of(each[name], each) for name in each} for each in (ours, right)]
        assert places[0] == places[1]
