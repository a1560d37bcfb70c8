# SPDX-License-Identifier: Apache-2.0
"""KV that real engines compress in the store: the tokens of an engine without connector."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors import safe_open

from lab.servers.engine_forks import EngineForks
from lab.servers.engines import EngineProcess, kv_argument
from tests.conftest import LOGS, engines
from tests.engines.chat import QUESTION, ask, picture, stored_kv, text

pytestmark = [pytest.mark.engine, pytest.mark.models]

ASKED = [
    [text("the sea and the stars, " * 20)],
    [picture(1, "one"), picture(2, "two"), QUESTION],
]


class Fleet(NamedTuple):
    plain: EngineProcess
    first: EngineProcess
    second: EngineProcess
    """Has an empty host cache: it can load only KV that `first` has stored."""
    root: Path


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def fleet(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    vlm: Path,
    forks: EngineForks,
) -> Iterator[Fleet]:
    """The engines of one dtype; they end before those of the next one start."""
    dtype: str = request.param
    root = tmp_path_factory.mktemp(dtype)

    def sharing(name: str) -> str:
        own = {"host_cache_dir": f"{root}/{name}-host", "compression": "zstd"}
        return kv_argument("both", f"file://{root}/store", **own)

    with engines(LOGS / f"{__name__}.{dtype}", vlm, forks) as start:
        fleet = (
            start("plain", f"--dtype={dtype}"),
            start("first", sharing("first"), f"--dtype={dtype}"),
            start("second", sharing("second"), f"--dtype={dtype}"),
        )
        for engine in fleet:
            engine.wait_ready()
        yield Fleet(*fleet, root)


@pytest.mark.parametrize("content", ASKED)
def test_compressed_kv_gives_the_plain_tokens(
    fleet: Fleet, content: list[dict[str, object]]
) -> None:
    plain = ask(fleet.plain, fleet.plain.model, content)
    assert ask(fleet.first, fleet.first.model, content).tokens == plain.tokens
    stored = stored_kv(fleet.root, "t0of1")
    assert stored
    for path in stored:
        with safe_open(path, framework="pt") as file:
            assert file.get_slice("tensor").get_dtype() == "U8"
    warm = ask(fleet.second, fleet.second.model, content)
    assert warm.num_cached_tokens == warm.num_prompt_tokens - 1
    assert warm.tokens == plain.tokens
