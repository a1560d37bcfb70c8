# SPDX-License-Identifier: Apache-2.0
"""The default of `buffer_bytes`, the memory that saves may use."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from vllm.config import VllmConfig

import kvshare.buffer_size as module
from ecshare.store.config import GIB, parse
from kvshare.buffer_size import memory_bytes, num_local_ranks, with_default_buffer
from kvshare.config import KVConfig
from tests.kvshare.conftest import StartEngine
from tests.kvshare.toy import BLOCK, cache_config, hybrid, options, vllm_config, write_model
from tests.releases import needs_offered_states

MIB = 1 << 20
SLAB_BYTES = 2 * 4096  # a block and its header: they are whole pages
TOKENS_OF_TWO_GIB = 2 * GIB // SLAB_BYTES * BLOCK


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """Configure a GPU engine on a large host whose steps compute one GiB of KV."""
    monkeypatch.setattr(module, "memory_bytes", lambda: 1024 * GIB)
    config = vllm_config(write_model(tmp_path / "model"), {})
    config.device_config.device_type = "cuda"
    config.scheduler_config.max_num_batched_tokens = TOKENS_OF_TWO_GIB // 2
    return config


def default_of(engine: VllmConfig, tmp_path: Path) -> int:
    config = parse(KVConfig, options(tmp_path), "options")
    return with_default_buffer(config, engine, cache_config(64)).buffer_bytes


def test_gpu_default_buffer_holds_two_steps(engine: VllmConfig, tmp_path: Path) -> None:
    assert default_of(engine, tmp_path) == 2 * GIB


@needs_offered_states
@pytest.mark.parametrize(("max_num_seqs", "expected"), [(1, 1), (100, 100), (1 << 20, 1 << 16)])
def test_default_buffer_holds_a_state_of_each_prompt_that_two_steps_can_end(
    engine: VllmConfig, tmp_path: Path, max_num_seqs: int, expected: int
) -> None:
    """As many as there are requests, or blocks in a step."""
    engine.scheduler_config.max_num_seqs = max_num_seqs
    engine.scheduler_config.max_num_batched_tokens = BLOCK << 16
    config = parse(KVConfig, options(tmp_path), "options")
    found = with_default_buffer(config, engine, cache_config(64, hybrid())).buffer_bytes
    assert found == GIB + 2 * expected * SLAB_BYTES


@pytest.mark.parametrize(("gib_a_step", "expected"), [(0.25, 1), (0.5, 1), (2, 4), (8, 4)])
def test_default_buffer_is_between_1_and_4_gib(
    engine: VllmConfig, tmp_path: Path, gib_a_step: float, expected: int
) -> None:
    engine.scheduler_config.max_num_batched_tokens = int(gib_a_step * TOKENS_OF_TWO_GIB / 2)
    assert default_of(engine, tmp_path) == expected * GIB


@pytest.mark.parametrize(
    ("memory_gib", "num_ranks", "num_engines", "expected"),
    [(32, 1, 1, 2), (24, 1, 1, 1.5), (192, 8, 1, 1.5), (96, 2, 2, 1.5), (8, 1, 1, 1), (0, 1, 1, 1)],
)
def test_all_local_ranks_together_use_a_sixteenth_of_memory(  # noqa: PLR0913
    engine: VllmConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory_gib: int,
    num_ranks: int,
    num_engines: int,
    expected: float,
) -> None:
    monkeypatch.setattr(module, "memory_bytes", lambda: memory_gib * GIB)
    engine.parallel_config.world_size = num_ranks
    engine.parallel_config.data_parallel_size_local = num_engines
    assert num_local_ranks(engine) == num_ranks * num_engines
    assert default_of(engine, tmp_path) == expected * GIB


def test_independent_dp_replicas_share_the_memory(
    engine: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM configures each dense replica as the only one, yet each sees the GPUs of all."""
    monkeypatch.setattr(module, "memory_bytes", lambda: 192 * GIB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    engine.parallel_config.data_parallel_size = 8
    engine.parallel_config.data_parallel_size_local = 8
    engine.parallel_config.reconfigure_for_independent_dp_rank()
    assert default_of(engine, tmp_path) == 1.5 * GIB


def on_a_cpu(engine: VllmConfig) -> None:
    engine.device_config.device_type = "cpu"


def with_ray(engine: VllmConfig) -> None:
    engine.parallel_config.distributed_executor_backend = "ray"


def that_only_loads(engine: VllmConfig) -> None:
    assert engine.kv_transfer_config is not None
    engine.kv_transfer_config.kv_role = "kv_consumer"


def that_shares_nothing(engine: VllmConfig) -> None:
    engine.cache_config.prefix_caching_hash_algo = "xxhash"


@pytest.mark.parametrize("change", [on_a_cpu, with_ray, that_only_loads, that_shares_nothing])
def test_cpu_ray_or_consumer_engines_keep_the_fixed_default(
    engine: VllmConfig, tmp_path: Path, change: Any
) -> None:
    change(engine)
    assert default_of(engine, tmp_path) == GIB


def test_buffer_bytes_option_overrides_the_default_and_is_logged(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def of_2_mib(config: KVConfig, *_: object) -> KVConfig:
        return structs.replace(config, buffer_bytes=2 * MIB)

    caplog.set_level("INFO", "kvshare")
    monkeypatch.setattr(module, "with_default_buffer", of_2_mib)
    start(store={"buffer_bytes": 3 * MIB})
    assert "saves may take 3 MiB" in caplog.text
    caplog.clear()
    start()
    assert "saves may take 2 MiB" in caplog.text


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"memory.max": "max\n"}, None),
        ({"memory.max": "1073741824\n"}, GIB),
        ({"memory/memory.limit_in_bytes": "2147483648\n"}, 2 * GIB),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_container_memory_is_its_cgroup_limit(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    all_of_it = memory_bytes(tmp_path / "none")
    assert all_of_it > GIB
    assert memory_bytes(tmp_path) == min(all_of_it, expected or all_of_it)
