# SPDX-License-Identifier: Apache-2.0
"""Embeddings of tensor-parallel engines: one rank stores them, every rank loads them."""

from pathlib import Path
from typing import NamedTuple

import pytest

from lab.servers.engines import EngineProcess, ec_argument
from tests.conftest import StartEngine
from tests.engines.chat import QUESTION, announced, ask, counting, counts, passed_on, picture
from tests.releases import needs_encoder_metrics

pytestmark = [pytest.mark.engine, needs_encoder_metrics]

TWO_RANKS = "--tensor-parallel-size=2"
ONE_CORE_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
ENCODED, LOADED, SAVED = (f"ecshare_items/{event}" for event in ("encoded", "loaded", "saved"))
MOST_STEPS = 300
"""The most engine steps until an encoder's scheduler learns of stored embeddings."""


class Fleet(NamedTuple):
    plain: EngineProcess
    encoder: EngineProcess
    encoder_of_two: EngineProcess
    consumer_of_two: EngineProcess
    store: Path

    def stored(self) -> set[Path]:
        return {path for path in (self.store / "ec").rglob("*") if len(path.name) == 64}


@pytest.fixture(scope="module")
def fleet(
    engine: StartEngine, plain: EngineProcess, tmp_path_factory: pytest.TempPathFactory
) -> Fleet:
    root = tmp_path_factory.mktemp("fleet")
    url, host = str(root / "store"), str(root / "host")
    producer = ec_argument("producer", url, host_cache_dir=host, save="durable")
    consumer = ec_argument("consumer", url, host_cache_dir=host)
    started = (
        plain,
        engine("encoder", producer),
        engine("encoder-of-two", TWO_RANKS, producer, environment=ONE_CORE_EACH),
        engine("consumer-of-two", TWO_RANKS, consumer, environment=ONE_CORE_EACH),
    )
    for each in started:
        each.wait_ready()
    return Fleet(*started, root / "store")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_rank_loads_embeddings_stored_by_one(fleet: Fleet, num_ranks: int) -> None:
    encoder = (fleet.encoder, fleet.encoder_of_two)[num_ranks - 1]
    uuids = [f"{name} of {num_ranks}" for name in ("one", "two")]
    shown = [picture(2 * num_ranks + at, uuid) for at, uuid in enumerate(uuids)]
    known = fleet.stored()
    before = counts(encoder)[SAVED]
    with counting(encoder) as gained:
        encoded = ask(encoder, encoder.model, shown)
        for _ in range(MOST_STEPS):
            if counts(encoder)[SAVED] > before:
                break
            ask(encoder, encoder.model, shown)
    assert (gained[ENCODED], gained[SAVED]) == (2, 2)
    assert len(fleet.stored() - known) == 2
    content = [*(announced(encoded, uuid) for uuid in uuids), QUESTION]
    consumer, params = fleet.consumer_of_two, passed_on(encoded)
    with counting(consumer) as gained:
        answer = ask(consumer, consumer.model, content, **params)
    assert answer.tokens == ask(fleet.plain, fleet.plain.model, [*shown, QUESTION]).tokens
    assert (gained[LOADED], gained[ENCODED]) == (2, 0)
    other = ask(fleet.plain, fleet.plain.model, [*reversed(shown), QUESTION])
    assert other.tokens != answer.tokens
