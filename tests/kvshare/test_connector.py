# SPDX-License-Identifier: Apache-2.0
"""The connector class: options, roles, and what it declares to vLLM."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.outputs import KVConnectorOutput

from ecshare.plugin.metrics import CounterStats
from ecshare.plugin.ranks import Rank
from ecshare.store.errors import ConfigError
from ecshare.store.keys import FORMAT_VERSION
from kvshare import connector
from kvshare.config import KVConfig
from kvshare.connector import KVShareConnector
from kvshare.scheduler.scheduler import KVScheduler
from kvshare.worker.worker import KVWorker
from tests.expiry import expire, renew_often, wait_until_there
from tests.kvshare.conftest import StartEngine
from tests.kvshare.toy import (
    BLOCK,
    cache_config,
    make_request,
    objects,
    options,
    serve,
    spec,
    vllm_config,
    window,
)

PROMPT = list(range(23))


def start_scheduler_half(config: VllmConfig) -> KVShareConnector:
    return KVShareConnector(config, KVConnectorRole.SCHEDULER, cache_config(8))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"urll": "x"}, r"kv_connector_extra_config\.urll: unknown option"),
        ({"wait_s": "soon"}, r"kv_connector_extra_config\.wait_s: "),
        ({"url": "nosuch://x"}, r"kv_connector_extra_config\.url: "),
    ],
)
def test_config_error_names_the_wrong_option(
    text_model: Path, tmp_path: Path, change: dict[str, object], says: str
) -> None:
    config = vllm_config(text_model, options(tmp_path, **change))
    with pytest.raises(ConfigError, match=says):
        start_scheduler_half(config)


def test_second_connector_below_multi_connector_is_refused(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MultiConnector stops the engine if two connectors return transfer params for one request."""
    config = vllm_config(text_model, {})
    children = [
        {
            "kv_connector": "KVShareConnector",
            "kv_connector_module_path": "kvshare.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": options(tmp_path, url=f"file://{tmp_path}/{name}"),
        }
        for name in ("near", "far")
    ]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children},
    )
    says = r"kv_connector_extra_config\.connectors: an engine can have one KVShareConnector"
    running: set[KVShareConnector] = set()  # keeps the first connector alive until it is shut down
    monkeypatch.setattr(connector, "_open_connectors", running)
    with pytest.raises(ConfigError, match=says):
        MultiConnector(config, KVConnectorRole.SCHEDULER, cache_config(8))
    (near,) = running
    near.shutdown()
    # Two engines in one process are allowed, and so is a second connector of one config.
    own = [vllm_config(text_model, options(tmp_path)) for _ in range(2)]
    for each in [start_scheduler_half(config) for config in (*own, own[1])]:
        each.shutdown()


def test_scheduler_process_creates_no_worker_half(start: StartEngine) -> None:
    assert not hasattr(start().connector, "worker")


def test_connector_does_not_require_kv_delivery(start: StartEngine) -> None:
    """vLLM holds requests and blocks back for a connector that requires delivery."""
    engine = start("kv_producer")
    assert not engine.scheduler.requires_kv_delivery
    assert engine.scheduler.recompute_kv_load_failures


def test_engine_that_cannot_share_serves_and_logs_the_reason(
    text_model: Path, start: StartEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(prefix_caching_hash_algo="xxhash")
    assert serve(engine, PROMPT).kv_transfer_params is None
    assert "kvshare saves and loads nothing: --prefix-caching-hash-algo is xxhash" in caplog.text
    assert objects(tmp_path) == []
    assert "tokens/queried" not in engine.counts


def test_engine_with_context_parallelism_logs_at_start_what_to_leave_out(
    text_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parallel: dict[str, Any] = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    one_head = {"num_key_value_heads": 1}  # vLLM wants more ranks than heads
    config = vllm_config(text_model, options(tmp_path), hf_overrides=one_head, **parallel)
    KVScheduler.start(config, cache_config(8), KVConfig(**options(tmp_path)))
    assert "block: leave --decode-context-parallel-size out." in caplog.text


def test_worker_that_refuses_the_layers_stops_the_scheduler_half(
    text_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One group has layers of several shapes, as with a draft model. Only the worker sees them."""
    config = vllm_config(text_model, options(tmp_path))
    found = cache_config(8)
    (group,) = found.kv_cache_groups
    first, *others = group.layer_names
    specs: dict[str, KVCacheSpec] = {
        first: replace(spec(), head_size=16),
        **dict.fromkeys(others, spec()),
    }
    group.kv_cache_spec = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs)
    seen = generate_scheduler_kv_cache_config([found])
    half = KVScheduler.start(config, seen, KVConfig(**options(tmp_path)))
    worker = KVWorker.start(config, found, KVConfig(**options(tmp_path)), Rank(0, 1))
    worker.register({})
    assert "kvshare saves and loads nothing: some layers of one cache group" in caplog.text
    half.reported(KVConnectorOutput(kv_connector_worker_meta=worker.report()))
    assert half.num_loadable_tokens(make_request("r", PROMPT), 0) == 0
    assert worker.report() is None, "said once"
    for each in (half, worker):
        each.close()


def test_worker_threads_select_the_workers_device(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    selected: list[tuple[str, int]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda chosen: selected.append((threading.current_thread().name, chosen)),
    )
    config = vllm_config(text_model, options(tmp_path))
    config.device_config.device = torch.device("cuda:1")
    of_store = KVConfig(**options(tmp_path))
    KVWorker.start(config, cache_config(8), of_store, Rank(0, 1)).close()
    assert ("ecshare-io", 1) in selected


def test_log_names_differing_block_size_and_layer_sets(
    text_model: Path, start: StartEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serve(start(), PROMPT)
    config = vllm_config(text_model, options(tmp_path, chunk_tokens=2 * BLOCK))
    config.cache_config.block_size = 2 * BLOCK
    cache = cache_config(8, [replace(window(9), block_size=2 * BLOCK)])
    KVShareConnector(config, KVConnectorRole.SCHEDULER, cache).shutdown()
    assert f"block_size: {2 * BLOCK} != {BLOCK}" in caplog.text
    assert "layer_sets: " in caplog.text


def test_manifest_and_size_mark_are_renewed_before_expiry(
    start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew_often(monkeypatch)
    serve(start(), PROMPT)
    expired = expire(tmp_path / "store")
    of_version = str(FORMAT_VERSION)
    assert {path.parts[-3] for path in expired} == {of_version, "sizes"}, "a manifest and a mark"
    wait_until_there(expired)


def test_counters_aggregate_as_vllm_connector_stats() -> None:
    stats = KVShareConnector.build_kv_connector_stats({"blocks/saved": 2})
    assert isinstance(stats, CounterStats)
    total = stats.aggregate(CounterStats(data={"blocks/saved": 3, "blocks/loaded": 1}))
    assert total.reduce() == {"blocks/loaded": 1, "blocks/saved": 5}
