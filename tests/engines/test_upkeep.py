# SPDX-License-Identifier: Apache-2.0
"""Tenants on one store, a store that moves, and a tenant whose data goes while engines run."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ecshare.cli import main
from lab import model_cache
from lab.servers.engine_forks import EngineForks
from lab.servers.engines import EngineProcess, kv_argument
from tests.conftest import CACHE, LOGS, engines
from tests.ecshare.upkeep.stores import files
from tests.engines.chat import Answer, ask, stored_kv, text

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

BLOCK = 32
STORY = "Tell me a story about the sea, the wind and the stars, and of an old stone house. " * 8


class Fleet(NamedTuple):
    plain: EngineProcess
    acme: EngineProcess
    other: EngineProcess
    moved: EngineProcess
    """Of the first tenant, on another store."""
    root: Path

    def ask(self, engine: EngineProcess) -> Answer:
        """Ask `engine`; the tokens are those of the plain one."""
        answer = ask(engine, engine.model, [text(STORY)])
        assert answer.tokens == ask(self.plain, engine.model, [text(STORY)]).tokens
        return answer


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, forks: EngineForks) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("upkeep")
    shape = (f"--block-size={BLOCK}", "--num-gpu-blocks-override=256", "--limit-mm-per-prompt={}")

    def sharing(name: str, store: str, tenant: str) -> tuple[str, ...]:
        (root / store).mkdir(exist_ok=True)
        own = {"host_cache_dir": f"{root}/{name}-host", "chunk_tokens": 2 * BLOCK}
        argument = kv_argument("both", f"file://{root}/{store}", tenant=tenant, **own)
        return (name, *shape, argument, "--no-enable-prefix-caching")

    model = model_cache.model(CACHE / "models", "qwen2")
    with engines(LOGS / __name__, model, forks) as start:
        fleet = Fleet(
            start("plain", *shape),
            start(*sharing("acme", "store", "acme")),
            start(*sharing("other", "store", "other")),
            start(*sharing("moved", "new", "acme")),
            root,
        )
        for engine in fleet[:4]:
            engine.wait_ready()
        yield fleet


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_tenants_are_separate_and_the_data_of_one_is_moved_and_removed(fleet: Fleet) -> None:
    store, new = fleet.root / "store", fleet.root / "new"
    assert fleet.ask(fleet.acme).num_cached_tokens == 0
    stored_kv(fleet.root, "t0of1")
    of_acme = files(store)
    assert fleet.ask(fleet.other).num_cached_tokens == 0
    stored_kv(fleet.root, "t0of1")

    assert run("export", store, fleet.root / "acme.tar", "--tenant", "acme") == 0
    assert run("import", fleet.root / "acme.tar", new) == 0
    loaded = fleet.ask(fleet.moved)
    assert loaded.num_cached_tokens == loaded.num_prompt_tokens - 1

    assert run("rm", store, "--tenant", "acme", "--yes") == 0
    left = files(store)
    assert not {name for name in of_acme & left if name.startswith("kv/2/") and "." in name}
    assert run("rm", store, "--tenant", "acme", "--yes") == 2
    # It keeps serving with what is in its host cache, which rm does not reach.
    assert fleet.ask(fleet.acme).num_cached_tokens == loaded.num_cached_tokens
    assert fleet.ask(fleet.other).num_cached_tokens == loaded.num_cached_tokens
