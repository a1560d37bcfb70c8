# SPDX-License-Identifier: Apache-2.0
"""Fixtures and helpers: engines over one store, and steps until a condition holds."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from kvshare.connector import KVShareConnector
from lab.vllm_loop import RunnerName
from tests.kvshare.gated import GatedFileSystem
from tests.kvshare.toy import ToyEngine, ToyModel, options, ours, vllm_config, write_model

StartEngine = Callable[..., ToyEngine]

SPIN_S = 60.0


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(text_model: Path, tmp_path: Path) -> Iterator[StartEngine]:
    """Start an engine on the store of this test, or on another one with `folder`."""
    started: list[ToyEngine] = []

    def start(
        kv_role: str = "kv_both",
        *,
        folder: Path | None = None,
        num_blocks: int = 64,
        is_async: bool = False,
        store: dict[str, Any] | None = None,
        specs: Sequence[KVCacheSpec] = (),
        runner: RunnerName = "v1",
        model: type[ToyModel] = ToyModel,
        cache: KVCacheConfig | None = None,
        **engine_args: Any,
    ) -> ToyEngine:
        config = vllm_config(
            text_model, options(folder or tmp_path, **(store or {})), kv_role, **engine_args
        )
        engine = ToyEngine(
            config,
            num_blocks=num_blocks,
            is_async=is_async,
            specs=specs,
            runner=runner,
            model=model,
            cache=cache,
        )
        started.append(engine)
        return started[-1]

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def gated(start: StartEngine, tmp_path: Path) -> Iterator[StartEngine]:
    """Start engines on one store in memory, each with its own host cache."""
    hosts = iter(range(100))

    def start_gated(
        kv_role: str = "kv_both", engine: dict[str, Any] | None = None, **more: object
    ) -> ToyEngine:
        store = {
            "url": "gated://bucket",
            "wait_s": 25.0,
            "io_timeout_s": 5.0,
            "host_cache_dir": f"{tmp_path}/host-{next(hosts)}",
        }
        return start(kv_role, store=store | more, **(engine or {}))

    yield start_gated
    GatedFileSystem.reset()


def spin(engine: ToyEngine, is_so: Callable[[], bool], otherwise: str) -> None:
    """Step until `is_so`, a condition that lasts once it holds: a step may wait for a transfer.

    Raises:
        AssertionError: it is not within `SPIN_S`; says `otherwise`.
    """
    deadline_s = time.monotonic() + SPIN_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"{otherwise}, in {SPIN_S} s"
        engine.step()


def worker_connector(engine: ToyEngine) -> KVShareConnector:
    (rank,) = engine.runners
    return ours(rank.kv_connector)


def sleep_and_wake(engine: ToyEngine) -> None:
    """Free the cache's memory and register it again, as vLLM's workers do since 0.33."""
    connector = worker_connector(engine)
    connector.unregister_kv_caches()
    for layer in engine.model.kv_caches.values():
        layer.fill_(-7.0)
    connector.restore_kv_caches()


def is_at_rest(engine: ToyEngine) -> bool:
    """Return whether vLLM and both halves hold no request any more."""
    halves = (engine.connector.scheduler, engine.worker)
    pool = engine.scheduler.kv_cache_manager.block_pool
    is_empty = not engine.scheduler.requests and all(half.is_empty for half in halves)
    return is_empty and pool.get_usage() == 0.0
