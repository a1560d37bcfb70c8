# SPDX-License-Identifier: Apache-2.0
"""Engines over one store."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec

from tests.kvshare.toy import ToyEngine, options, vllm_config, write_model

StartEngine = Callable[..., ToyEngine]


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
        **engine_args: Any,
    ) -> ToyEngine:
        config = vllm_config(
            text_model, options(folder or tmp_path, **(store or {})), kv_role, **engine_args
        )
        started.append(ToyEngine(config, num_blocks=num_blocks, is_async=is_async, specs=specs))
        return started[-1]

    yield start
    for engine in started:
        engine.close()
