# SPDX-License-Identifier: Apache-2.0
"""KV between engines that guess ahead: with a draft model of another KV shape, with layers of the
model itself."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from lab.models.drafts import (
    add_mtp_layer,
    make_draft,
    make_eagle,
    make_eagle3,
    with_small_embeddings,
)
from lab.models.text import make_qwen2
from lab.servers.engine_forks import EngineForks
from lab.servers.engines import EngineProcess, ModelRunner, kv_argument
from lab.servers.openai_client import counters
from tests.conftest import LOGS, engines
from tests.engines.chat import complete, counting, stored_kv
from tests.engines.runners import on_each_runner
from tests.releases import needs_packed_layouts

pytestmark = [pytest.mark.engine, pytest.mark.models, on_each_runner, needs_packed_layouts]

BLOCK = 32
LENGTHS = (416, 590, 777)
ANSWER = 100
DRAFT_PARTS = "t0of1-s1"


class Fleet(NamedTuple):
    plain: EngineProcess
    """Guesses nothing."""
    first: EngineProcess
    second: EngineProcess
    root: Path
    draft_parts: str | None
    """Of objects with the KV of layers that guess; None: it is in those of the target."""

    def accepted(self, engine: EngineProcess, prompts: Sequence[list[int]]) -> float:
        """Ask `engine`; the tokens are those of the plain one. Return the share of all guesses
        that it accepts."""
        before = counters(engine.base_url)
        for prompt in prompts:
            answer = complete(engine, engine.model, prompt, ANSWER)
            expected = complete(self.plain, self.plain.model, prompt, ANSWER)
            assert answer.tokens == expected.tokens
        after = counters(engine.base_url)
        accepted, guessed = (
            after[f"vllm:spec_decode_num_{name}_tokens_total", ""]
            - before[f"vllm:spec_decode_num_{name}_tokens_total", ""]
            for name in ("accepted", "draft")
        )
        return accepted / guessed


@pytest.fixture(scope="module", params=["draft_model", "eagle", "eagle3", "mtp"])
def fleet(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    runner: ModelRunner,
    forks: EngineForks,
) -> Iterator[Fleet]:
    method: str = request.param
    root = tmp_path_factory.mktemp(method)
    guesses: dict[str, object] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        target = make_qwen2(root / "target")
        guesses["model"] = str(make_draft(root / "draft", target))
    else:
        target = make_qwen2(root / "target", num_hidden_layers=1)
    if method == "eagle":
        guesses["model"] = str(make_eagle(root / "draft", target))
    elif method == "eagle3":
        guesses["num_speculative_tokens"] = 1  # later ones add what the head itself computes
        guesses["model"] = str(make_eagle3(root / "draft", with_small_embeddings(target)))
    elif method == "mtp":
        add_mtp_layer(target)
    shape = (f"--block-size={BLOCK}", "--limit-mm-per-prompt={}")

    def guessing(name: str) -> tuple[str, ...]:
        own = {"host_cache_dir": f"{root}/{name}-host", "chunk_tokens": 2 * BLOCK}
        sharing = kv_argument("both", f"file://{root}/store", **own)
        return (*shape, f"--speculative-config={json.dumps(guesses)}", sharing)

    with engines(LOGS / f"{__name__}.{method}.{runner}", target, forks) as start:
        plain = start("plain", *shape)
        first, second = (
            start(name, *guessing(name), runner=runner) for name in ("first", "second")
        )
        for engine in (plain, first, second):
            engine.wait_ready()
        yield Fleet(plain, first, second, root, None if method == "mtp" else DRAFT_PARTS)


def prompt_of(number: int, length: int) -> list[int]:
    """Return a prompt of ordinary tokens, another one for each number."""
    return [(7 * place * (number + 3) + place // 9) % 200 + 20 for place in range(length)]


def test_second_engine_loads_the_kv_of_both_models_and_accepts_as_many_drafts(
    fleet: Fleet,
) -> None:
    prompts = [prompt_of(number, length) for number, length in enumerate(LENGTHS)]
    cold = fleet.accepted(fleet.first, prompts)
    assert cold > 0.5, "the draft model guesses too badly for a comparison"
    assert stored_kv(fleet.root, fleet.draft_parts or "t0of1")
    with counting(fleet.second) as gained:
        warm = fleet.accepted(fleet.second, prompts)
    assert gained["kvshare_tokens/loaded"] == sum(length - 1 for length in LENGTHS)
    assert warm >= 0.95 * cold, f"accepted {cold:.3f} cold, {warm:.3f} warm"
