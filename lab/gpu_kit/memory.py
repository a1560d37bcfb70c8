# SPDX-License-Identifier: Apache-2.0
"""Checks of memory: our part of the device's, pinned memory, and the devices that we use."""

import subprocess
import sys
from dataclasses import replace

import torch
from torch import Tensor

from lab.gpu_kit.driver import Pinned, has_context
from lab.gpu_kit.kit import Bench, Check, Skipped
from lab.gpu_kit.layouts import EIGHT_B, SMALL, bits, fill, make_cache
from lab.gpu_kit.workers import MIB, EncoderHost, KVHost, chunks, drawn

MOST_DEVICE_BYTES = 64 * MIB
_LOAD_BUFFERS_BYTES = 128 * MIB
_CHUNK_BLOCKS = 16


def _moved(bench: Bench, source: Tensor, target: Tensor, buffer_bytes: int) -> None:
    """Save all blocks of `source`, and load them into `target`."""
    store, host_cache = bench.folder(), bench.folder()
    ids = list(range(source.shape[1]))
    pieces = chunks(ids, _CHUNK_BLOCKS, source.shape[3])
    half = max(1, len(pieces) // 2)
    with KVHost(bench, source, store, host_cache=host_cache, buffer_bytes=buffer_bytes) as writer:
        for some in (pieces[:half], pieces[half:]):
            writer.save(*some)
            writer.settle()
        assert not writer.counts().get("blocks/dropped"), "the buffer was not reused"
    with KVHost(bench, target, store, host_cache=host_cache, buffer_bytes=buffer_bytes) as reader:
        reader.load("r", *pieces)
        assert not reader.settle().invalid_blocks


def kv_uses_at_most_64_mib_of_device_memory(bench: Bench) -> None:
    """For a step of 8,192 tokens of an 8B-class model, saved and loaded, we use 64 MiB at most."""
    sizes = EIGHT_B if bench.is_gpu else replace(EIGHT_B, layers=2, blocks=64)
    source = make_cache(sizes, "LBHNC", torch.bfloat16, bench.device)
    target = torch.zeros_like(source)
    fill(source, 1)
    bench.finish()
    if not bench.is_gpu:
        _moved(bench, source, target, source.nbytes)
        assert torch.equal(bits(source), bits(target))
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(bench.device)
    before = torch.cuda.memory_allocated(bench.device)
    free_before, _ = torch.cuda.mem_get_info(bench.device)
    _moved(bench, source, target, source.nbytes)
    ours = torch.cuda.max_memory_allocated(bench.device) - before
    taken = free_before - torch.cuda.mem_get_info(bench.device)[0]
    bench.notes.append(f"{ours / MIB:.1f} MiB by torch, {taken / MIB:.1f} MiB of the device in all")
    assert max(ours, taken) <= MOST_DEVICE_BYTES
    assert torch.equal(bits(source), bits(target))


def embedding_loads_reuse_device_memory(bench: Bench) -> None:
    """Loads reuse the memory that vLLM releases, although their stream has a pool of its own."""
    bench.needs_gpu()
    with EncoderHost(bench, bench.folder(), buffer_bytes=256 * MIB) as host:
        for number in range(8):
            size = (1 + number * 37 % 11) * 100
            host.encode(str(number), drawn(size, 3584, torch.bfloat16, bench.device))
        host.wait_for("saved", 8)
        reserved = []
        for turn in range(40):
            host.cache.clear()
            for number in range(8):
                host.load(str((turn + number) % 8))
            used = [each.float().sum() for each in host.cache.values()]
            if turn % 4 == 3:
                bench.finish()  # between two of these the device may be late
            reserved.append(torch.cuda.memory_reserved(bench.device))
            del used
    early, most = max(reserved[:8]), max(reserved)
    bench.notes.append(f"{early / MIB:.0f} MiB after 8 turns, {most / MIB:.0f} MiB after 40")
    assert most <= early + MOST_DEVICE_BYTES


def _pinned_by_torch() -> int:
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def pinned_memory_is_bounded(bench: Bench) -> None:
    """A worker pins at most `buffer_bytes` + 128 MiB for KV, and `buffer_bytes` for embeddings."""
    bench.needs_gpu()
    limit = 64 * MIB
    cache = make_cache(SMALL, "LBHNC", torch.bfloat16, bench.device)
    by_torch = _pinned_by_torch()
    with Pinned().watching() as pinned:
        with KVHost(bench, cache, bench.folder(), buffer_bytes=limit) as host:
            for seed in range(3):
                fill(cache, seed)
                host.save(*chunks(range(SMALL.blocks), 4, SMALL.block_tokens))
                host.settle()
        assert pinned.most_bytes <= limit + _LOAD_BUFFERS_BYTES
        before = pinned.num_bytes
        with EncoderHost(bench, bench.folder(), buffer_bytes=limit) as encoder:
            for number in range(20):
                name = str(number)
                size = (1 + number * 37 % 11) * 1000
                encoder.encode(name, drawn(size, 64, torch.bfloat16, bench.device))
                encoder.wait_for("saved", number + 1)
                encoder.load(name)
            assert pinned.num_bytes - before <= limit
    bench.notes.append(f"{pinned.most_bytes / MIB:.0f} MiB were pinned at most")
    assert _pinned_by_torch() <= by_torch, "torch has pinned memory too"


def rank_uses_only_its_own_device(bench: Bench) -> None:
    """No thread of a rank creates a context on another device of the host."""
    bench.needs_gpu()
    others = [each for each in range(torch.cuda.device_count()) if each != bench.device.index]
    if not others:
        raise Skipped("needs two GPUs")
    made = [each for each in others if has_context(each)]
    assert not made, f"a context was made on devices {made}"
    if bench.device.index:
        return
    # Threads begin on device 0, so only a rank on another device shows a mistake.
    command = [sys.executable, "-m", "lab.gpu_kit", "--device", "cuda:1"]
    only = ["kv", "embeddings", "memory"]
    ran = subprocess.run([*command, "--only", *only], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


CHECKS: tuple[Check, ...] = (
    kv_uses_at_most_64_mib_of_device_memory,
    embedding_loads_reuse_device_memory,
    pinned_memory_is_bounded,
    rank_uses_only_its_own_device,
)
