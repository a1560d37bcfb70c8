# SPDX-License-Identifier: Apache-2.0
"""Pipelines of two stages: each stores and loads the KV of its layers; the first one encodes."""

from pathlib import Path
from typing import NamedTuple

import pytest

from lab import model_cache
from lab.servers.engines import EngineProcess, ModelRunner, ec_argument, kv_argument
from tests.conftest import CACHE, StartEngine
from tests.engines.chat import QUESTION, Answer, ask, complete, counting, picture, stored_kv, text
from tests.engines.runners import on_each_runner
from tests.releases import VLLM, needs_encoder_metrics, needs_offered_states

pytestmark = [pytest.mark.engine, pytest.mark.models, on_each_runner]

STORY = "Tell me a story about the sea, the wind and the stars. " * 12
# vLLM's CPU runner makes the tensors that a later stage receives only while it warms up for a
# compiler: without one, `assert self.intermediate_tensors is not None` ends the first step.
TWO_STAGES = (
    "--pipeline-parallel-size=2",
    "--no-enforce-eager",
    '--compilation-config={"mode": 1, "backend": "eager"}',
    # Since 0.33 V2 runners also run kernels ahead that Triton's interpreter cannot run.
    *(() if VLLM < (0, 33) else ('--kernel-config={"enable_jit_warmup": false}',)),
)
ENCODED, LOADED = "ecshare_items/encoded", "ecshare_items/loaded"


class Fleet(NamedTuple):
    plain: EngineProcess
    first: EngineProcess
    second: EngineProcess
    alone: EngineProcess
    root: Path


@pytest.fixture(scope="module")
def fleet(
    engine: StartEngine,
    plain: EngineProcess,
    tmp_path_factory: pytest.TempPathFactory,
    runner: ModelRunner,
) -> Fleet:
    root = tmp_path_factory.mktemp("fleet")

    def sharing(name: str, *arguments: str) -> EngineProcess:
        url, host = f"file://{root}/store", f"{root}/{name}"
        transfers = (kind("both", url, host_cache_dir=host) for kind in (kv_argument, ec_argument))
        return engine(name, "--block-size=32", *arguments, *transfers, runner=runner)

    first, second = (sharing(name, *TWO_STAGES) for name in ("first", "second"))
    started = Fleet(plain, first, second, sharing("alone"), root)
    for each in started[:4]:
        each.wait_ready()
    return started


def names(root: Path, part: str) -> set[str]:
    """Return the names of the chunks that have this part."""
    return {path.name.partition(".")[0] for path in stored_kv(root, part)}


def test_pipeline_loads_kv_of_an_equal_one_and_an_engine_without_stages_misses(
    fleet: Fleet,
) -> None:
    story = [text(STORY)]
    expected = ask(fleet.plain, fleet.plain.model, story).tokens
    cold = ask(fleet.first, fleet.first.model, story)
    assert (cold.tokens, cold.num_cached_tokens) == (expected, 0)
    stages = [names(fleet.root, f"t0of1-p{stage}of2") for stage in range(2)]
    assert stages[0] == stages[1]
    assert len(stages[0]) > 1
    warm = ask(fleet.second, fleet.second.model, story)
    assert warm.tokens == expected
    assert warm.num_cached_tokens == warm.num_prompt_tokens - 1
    other = ask(fleet.alone, fleet.alone.model, story)
    assert (other.tokens, other.num_cached_tokens) == (expected, 0)


def test_pipeline_goes_on_if_one_stage_has_lost_its_objects(fleet: Fleet) -> None:
    story = [text(f"Once more: {STORY}")]
    expected = ask(fleet.plain, fleet.plain.model, story).tokens
    before = stored_kv(fleet.root, "t0of1-p1of2")
    assert ask(fleet.first, fleet.first.model, story).tokens == expected
    for path in stored_kv(fleet.root, "t0of1-p1of2") - before:
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    warm = ask(fleet.second, fleet.second.model, story)
    assert (warm.tokens, warm.num_cached_tokens) == (expected, 0)
    assert ask(fleet.second, fleet.second.model, [text("And now?")]).status == 200


@needs_encoder_metrics
def test_pipeline_loads_embeddings_of_another(fleet: Fleet) -> None:
    shown = [picture(7), QUESTION]
    expected = ask(fleet.plain, fleet.plain.model, shown).tokens
    with counting(fleet.first) as gained:
        assert ask(fleet.first, fleet.first.model, shown).tokens == expected
    assert (gained[ENCODED], gained[LOADED]) == (1, 0)
    # Another question, so that the KV of no picture is loaded.
    asked = [text("Look: "), picture(7), QUESTION]
    expected = ask(fleet.plain, fleet.plain.model, asked).tokens
    with counting(fleet.second) as gained:
        assert ask(fleet.second, fleet.second.model, asked).tokens == expected
    assert (gained[ENCODED], gained[LOADED]) == (0, 1)


@needs_offered_states
def test_pipeline_of_a_hybrid_loads_the_states_of_each_stage(
    engine: StartEngine, tmp_path: Path, runner: ModelRunner
) -> None:
    model = model_cache.model(CACHE / "models", "lfm2")
    url = f"file://{tmp_path}/store"
    hosts = (f"{tmp_path}/{name}" for name in ("one", "other"))
    plain = engine("plain-hybrid", model=model)
    pipelines = [
        engine(
            *(Path(host).name, *TWO_STAGES, kv_argument("both", url, host_cache_dir=host)),
            model=model,
            runner=runner,
        )
        for host in hosts
    ]
    for each in (plain, *pipelines):
        each.wait_ready()
    prompt = [(7 * place + place // 9) % 200 + 20 for place in range(700)]
    expected = complete(plain, plain.model, prompt).tokens
    cold, warm = (ask_for(each, prompt, tmp_path) for each in pipelines)
    assert (cold.tokens, cold.num_cached_tokens) == (expected, 0)
    assert (warm.tokens, warm.num_cached_tokens) == (expected, 640)


def ask_for(engine: EngineProcess, prompt: list[int], root: Path) -> Answer:
    """Return the answer once all of its KV is stored."""
    answer = complete(engine, engine.model, prompt)
    assert stored_kv(root, "t0of1-s1-p1of2")
    return answer
