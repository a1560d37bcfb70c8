# SPDX-License-Identifier: Apache-2.0
"""KV that real engines store as 8-bit floats: its effect on the next token, by model family."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors import safe_open

from lab import model_cache
from lab.servers.engine_forks import EngineForks
from lab.servers.engines import EngineProcess, kv_argument
from tests.conftest import CACHE, LOGS, engines
from tests.engines.chat import Answer, ask, picture, stored_kv, text

pytestmark = [pytest.mark.engine, pytest.mark.models]

STORY = "Tell me a story about the sea, the wind and the stars, and of an old stone house. "
ASKED = [
    [text(STORY * 8)],
    [text("the sea and the stars, " * 20)],
    [picture(1, "one"), picture(2, "two"), text("what is to be seen here, and where?")],
]
# The allowed error of a log-probability. Errors seen with these models are less than half of it.
MOST_ERROR = 0.5
CLEAR = 0.6  # the best token's lead over the second, in log-probability


class Fleet(NamedTuple):
    plain: EngineProcess
    first: EngineProcess
    second: EngineProcess
    """Has an empty host cache: it can load only KV that `first` has stored."""
    root: Path


@pytest.fixture(scope="module", params=["qwen2.5-vl", "qwen3-vl", "llava"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: EngineForks
) -> Iterator[Fleet]:
    """The engines of one family; they end before those of the next one start."""
    family: str = request.param
    root = tmp_path_factory.mktemp(family)

    def sharing(name: str) -> str:
        own = {"host_cache_dir": f"{root}/{name}-host", "stored_dtype": "fp8"}
        return kv_argument("both", f"file://{root}/store", **own)

    model = model_cache.model(CACHE / "models", family)
    with engines(LOGS / f"{__name__}.{family}", model, forks) as start:
        fleet = (
            start("plain"),
            start("first", sharing("first")),
            start("second", sharing("second")),
        )
        for engine in fleet:
            engine.wait_ready()
        yield Fleet(*fleet, root)


def best(answer: Answer) -> dict[str, float]:
    """The most probable first tokens, with their log-probabilities."""
    (first, *_) = answer.body["choices"][0]["logprobs"]["content"]
    return {each["token"]: each["logprob"] for each in first["top_logprobs"]}


@pytest.mark.parametrize("content", ASKED)
def test_float8_kv_keeps_next_token_probabilities_close(
    fleet: Fleet, content: list[dict[str, Any]]
) -> None:
    how = {"logprobs": True, "top_logprobs": 5}
    plain = ask(fleet.plain, fleet.plain.model, content, **how)
    cold = ask(fleet.first, fleet.first.model, content, **how)
    assert cold.tokens == plain.tokens, "the engine that computes uses its own exact KV"
    for path in stored_kv(fleet.root, "t0of1"):
        with safe_open(path, framework="pt") as file:
            assert file.get_slice("tensor").get_dtype() == "U8"
    warm = ask(fleet.second, fleet.second.model, content, **how)
    assert warm.num_cached_tokens == warm.num_prompt_tokens - 1
    expected, found = best(plain), best(warm)
    errors = [abs(found[token] - expected[token]) for token in expected.keys() & found.keys()]
    assert len(errors) > len(expected) / 2
    assert max(errors) < MOST_ERROR
    top, second, *_ = sorted(expected.values(), reverse=True)
    if top - second > CLEAR:
        assert warm.tokens[0] == plain.tokens[0]
