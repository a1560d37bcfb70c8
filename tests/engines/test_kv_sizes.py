# SPDX-License-Identifier: Apache-2.0
"""KV blocks between engines of different tensor-parallel sizes; the tokens are equal."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.servers.engine_forks import EngineForks
from lab.servers.engines import SMALL_ENGINE, EngineProcess, kv_argument
from tests.engines.chat import Answer, complete

pytestmark = [pytest.mark.engine, pytest.mark.models]  # minutes: not in the gate

BLOCK = 32
PROMPT = [20 + number * 7 % 400 for number in range(10 * BLOCK + 5)]
ANSWER_TOKENS = 2 * BLOCK


def talk(
    forks: EngineForks,
    vlm: Path,
    root: Path,
    name: str,
    arguments: Sequence[str],
    *turns: list[int],
) -> list[Answer]:
    """Start an engine, ask it the prompts, and stop it."""
    one_core_each = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if name.endswith("2") else {}
    fixed = (*SMALL_ENGINE, f"--block-size={BLOCK}")
    with EngineProcess(name, vlm, root, (*fixed, *arguments), one_core_each, forks=forks) as engine:
        return [complete(engine, engine.model, list(turn), ANSWER_TOKENS) for turn in turns]


def sharing(root: Path, name: str, size: int) -> tuple[str, ...]:
    kv = kv_argument("both", f"file://{root}/store", host_cache_dir=f"{root}/{name}-host")
    return kv, f"--tensor-parallel-size={size}"


def parts(root: Path) -> set[str]:
    return {path.suffix for path in (root / "store" / "kv").rglob("*.t*of*")}


def test_conversation_continues_on_another_tensor_parallel_size(
    vlm: Path, tmp_path: Path, forks: EngineForks
) -> None:
    """The chunks of the conversation end up in shares of both sizes."""
    (cold,) = talk(forks, vlm, tmp_path, "first-2", sharing(tmp_path, "first-2", 2), PROMPT)
    assert parts(tmp_path) == {".t0of2", ".t1of2"}
    longer = [*PROMPT, *cold.tokens, *range(30, 30 + 3 * BLOCK)]

    plain, plain_longer = talk(forks, vlm, tmp_path, "plain-1", (), PROMPT, longer)
    assert cold.tokens == plain.tokens

    warm, second = talk(
        forks, vlm, tmp_path, "one-1", sharing(tmp_path, "one-1", 1), PROMPT, longer
    )
    assert warm.tokens == plain.tokens
    assert warm.num_cached_tokens == len(PROMPT) - 1
    assert second.tokens == plain_longer.tokens
    assert second.num_cached_tokens >= (len(PROMPT) + len(cold.tokens) - 1) // BLOCK * BLOCK
    assert parts(tmp_path) == {".t0of2", ".t1of2", ".t0of1"}

    (last,) = talk(forks, vlm, tmp_path, "last-2", sharing(tmp_path, "last-2", 2), longer)
    assert last.tokens == plain_longer.tokens
    assert last.num_cached_tokens == len(longer) - 1
