# SPDX-License-Identifier: Apache-2.0
"""The weights of running engines are updated in place, under load: no answer uses old objects.

The gate does so with E, P and D, without load: see test_stages.py.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.open import open_store
from lab.servers.engines import EngineProcess, ModelRunner, ec_argument, kv_argument
from lab.servers.s3 import SeaweedFS
from tests.conftest import StartEngine
from tests.engines.chat import QUESTION, Answer, ask, picture, text
from tests.engines.runners import on_each_runner
from tests.engines.updating import DEV_MODE, begin_epoch, update

pytestmark = [pytest.mark.engine, pytest.mark.nightly, on_each_runner]

STORY = "Tell me a story about the sea, the wind and the stars, and of an old stone house. " * 4
CONTENTS = [
    [text(f"{number} {STORY}"), picture(number), picture(number + 1), QUESTION]
    for number in range(1, 5)
]


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, seaweed: SeaweedFS, runner: ModelRunner
) -> dict[str, Any]:
    """The options of a store."""
    if request.param == "folder":
        return {"url": f"file://{tmp_path}/store"}
    return {"url": f"{seaweed.url}/epochs-{runner}", "storage_options": seaweed.storage_options}


def at_rest(store: dict[str, Any]) -> None:
    """Return once nothing has been stored for a second. Engines answer before they have stored."""
    seen, now = {""}, asyncio.run(_objects(store))
    while seen != now:
        time.sleep(1)
        seen, now = now, asyncio.run(_objects(store))


async def _objects(store: dict[str, Any]) -> set[str]:
    opened = open_store(StoreConfig(**store), "options")
    try:
        return {info.key async for info in opened.list("kv/")}
    finally:
        await opened.close()


def ask_all(engine: EngineProcess) -> list[Answer]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda content: ask(engine, engine.model, content), CONTENTS))


def tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def are_loaded(answers: Sequence[Answer]) -> bool:
    return all(answer.num_cached_tokens == answer.num_prompt_tokens - 1 for answer in answers)


def test_weights_change_under_load(  # noqa: PLR0913 — fixtures
    engine: StartEngine,
    plain: EngineProcess,
    other_vlm: Path,
    tmp_path: Path,
    store: dict[str, Any],
    runner: ModelRunner,
    request: pytest.FixtureRequest,
) -> None:
    case = request.node.callspec.id

    def sharing(name: str) -> EngineProcess:
        host = store | {"host_cache_dir": f"{tmp_path}/{name}"}
        ec, kv = ec_argument("both", **host), kv_argument("both", **host)
        return engine(f"{name}-{case}", ec, kv, environment=DEV_MODE, runner=runner)

    first, second = sharing("first"), sharing("second")
    trained = engine(f"trained-{case}", model=other_vlm)
    old, new = tokens(ask_all(plain.wait_ready())), tokens(ask_all(trained.wait_ready()))
    trained.stop()
    assert all(before != after for before, after in zip(old, new, strict=True))
    assert tokens(ask_all(first.wait_ready())) == old
    at_rest(store)
    warm = ask_all(second.wait_ready())
    assert tokens(warm) == old
    assert are_loaded(warm)

    begin_epoch(json.dumps(store))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask_all, first)  # of the old weights, or aborted in the middle
        update(first, other_vlm)
        running.result()
    assert tokens(ask_all(first)) == new
    assert tokens(ask_all(second)) == old, "it is not updated yet, and loads nothing of the new"
    at_rest(store)
    update(second, other_vlm)
    warm = ask_all(second)
    assert tokens(warm) == new
    assert are_loaded(warm)

    restarted = sharing("restarted").wait_ready()
    warm = ask_all(restarted)
    assert tokens(warm) == old, "it has the weights of its files"
    assert are_loaded(warm)
    update(restarted, other_vlm)
    warm = ask_all(restarted)
    assert tokens(warm) == new
    assert are_loaded(warm)
