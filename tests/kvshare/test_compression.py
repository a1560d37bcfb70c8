# SPDX-License-Identifier: Apache-2.0
"""KV whose objects are compressed in the store, in whole engines with a toy model."""

import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ecshare.plugin.ranks import Rank
from ecshare.store.config import parse
from ecshare.store.errors import ConfigError
from ecshare.store.format import seal, unseal
from kvshare.config import OPTIONS_PATH, KVConfig
from kvshare.connector import KVShareConnector
from lab.vllm_loop import RunnerName
from tests.kvshare import test_streamed as streams
from tests.kvshare.conftest import StartEngine
from tests.kvshare.toy import cache_config, objects, options, serve, vllm_config

ZSTD = {"compression": "zstd"}
PROMPT = list(range(100, 230))


def on_host(tmp_path: Path, name: str) -> dict[str, Any]:
    return {**ZSTD, "host_cache_dir": f"{tmp_path}/{name}"}


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("is_async", [False, True])
def test_compressing_engines_share_only_with_each_other(
    start: StartEngine, tmp_path: Path, runner: RunnerName, is_async: bool
) -> None:
    how: dict[str, Any] = {"runner": runner, "is_async": is_async}
    answer = serve(start(store=on_host(tmp_path, "a"), **how), PROMPT)
    stored = objects(tmp_path)
    assert stored
    for path in stored:
        key = str(path.relative_to(tmp_path / "store"))
        sealed = unseal(memoryview(path.read_bytes()), key)
        assert sealed.spec.attributes["packed"] == "zstd"
    for name in ("a", "b"):  # "a" has the objects in its host cache, "b" loads them
        again = serve(start(store=on_host(tmp_path, name), **how), PROMPT)
        assert again.computed_prompt_tokens == 1
        assert again.tokens == answer.tokens
    assert serve(start(**how), PROMPT).computed_prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("is_async", [False, True])
def test_compressed_chunks_are_streamed_during_prefill(gated: StartEngine, is_async: bool) -> None:
    p, d = streams.start_p(gated, **ZSTD), streams.start_d(gated, is_async=is_async, **ZSTD)
    streams.hand_over(p, d)


def test_compression_works_with_an_integrity_key(start: StartEngine, tmp_path: Path) -> None:
    how = {"integrity_key": "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2"}
    serve(start(store={**on_host(tmp_path, "a"), **how}), PROMPT, max_tokens=1)
    again = serve(start(store={**on_host(tmp_path, "b"), **how}), PROMPT, max_tokens=1)
    assert again.computed_prompt_tokens == 1
    for path in objects(tmp_path):  # seal the objects again without the key
        key = str(path.relative_to(tmp_path / "store"))
        forged = bytearray(path.read_bytes())
        sealed = unseal(memoryview(forged), key)
        seal(memoryview(forged), sealed.spec, key)
        path.write_bytes(forged)
    third = start(store={**on_host(tmp_path, "c"), **how})
    assert serve(third, PROMPT, max_tokens=1).computed_prompt_tokens == len(PROMPT)


def test_engine_without_zstandard_does_not_start(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ecshare.plugin.ranks.worker_rank", lambda _: Rank(0, 1))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    config = vllm_config(text_model, options(tmp_path, **ZSTD))
    with pytest.raises(ConfigError, match=rf"{OPTIONS_PATH}\.compression: .*zstandard"):
        KVShareConnector(config, KVConnectorRole.WORKER, cache_config(8))


def test_unknown_compression_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"options\.compression"):
        parse(KVConfig, {"url": "/x", "compression": "gzip"}, "options")
