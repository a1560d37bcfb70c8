# SPDX-License-Identifier: Apache-2.0
"""Checks of KV: blocks from the device to the store and back."""

from dataclasses import replace

import torch
from torch import Tensor

from lab.gpu_kit.kit import Bench, Check
from lab.gpu_kit.layouts import DTYPES, LAYOUTS, SMALL, bits, fill, make_cache
from lab.gpu_kit.workers import CacheRefused, Kernels, KVHost, chunks, shuffled

_COUNT = 7
_TAIL = 5


def _loaded(host: KVHost, block_ids: list[int], tp_size: int | None = None) -> None:
    pieces = chunks(block_ids, 3, SMALL.block_tokens, tail=_TAIL)
    host.load("r", *(replace(each, tp_size=tp_size) for each in pieces))
    finished = host.settle()
    assert finished.requests == {"r"}
    assert not finished.invalid_blocks, "blocks were not loaded"


def _expected(source: Tensor, source_ids: list[int], target: Tensor, ids: list[int]) -> Tensor:
    """Return the bytes of an empty cache after its blocks `ids` were loaded."""
    expected = torch.zeros_like(bits(target))
    expected[:, ids] = bits(source)[:, source_ids]
    expected[:, ids[-1], :, _TAIL:] = 0  # unused bytes of a block are not stored
    return expected


def kv_is_unchanged_in_every_layout_and_dtype(bench: Bench) -> None:
    """KV is saved in each layout, and loaded into it and another. Other blocks stay unchanged."""
    for turn, dtype in enumerate(DTYPES):
        for number, layout in enumerate(LAYOUTS):
            other = LAYOUTS[(number + 1 + turn % 5) % len(LAYOUTS)]
            source = make_cache(SMALL, layout, dtype, bench.device)
            fill(source, number)
            source_ids = shuffled(SMALL, _COUNT, number)
            store = bench.folder()
            with KVHost(bench, source, store) as host:
                host.save(*chunks(source_ids, 3, SMALL.block_tokens, tail=_TAIL))
                host.settle()
            for target_layout in (layout, other):
                target = make_cache(SMALL, target_layout, dtype, bench.device)
                ids = shuffled(SMALL, _COUNT, number + 100)
                with KVHost(bench, target, store) as host:
                    _loaded(host, ids)
                expected = _expected(source, source_ids, target, ids)
                assert torch.equal(bits(target), expected), f"{dtype} {layout} to {target_layout}"


def one_rank_loads_kv_of_two_ranks(bench: Bench) -> None:
    """One rank loads what two ranks have saved, in each layout."""
    half = replace(SMALL, heads=SMALL.heads // 2)
    for number, layout in enumerate(LAYOUTS):
        source = make_cache(SMALL, layout, torch.bfloat16, bench.device)
        fill(source, number)
        store, source_ids = bench.folder(), shuffled(SMALL, _COUNT, number)
        for rank in range(2):
            own = make_cache(half, layout, torch.bfloat16, bench.device)
            own.copy_(source[:, :, rank * half.heads : (rank + 1) * half.heads])
            with KVHost(bench, own, store, rank=rank, tp_size=2) as host:
                host.save(*chunks(source_ids, 3, SMALL.block_tokens, tail=_TAIL))
                host.settle()
        target = make_cache(SMALL, layout, torch.bfloat16, bench.device)
        ids = shuffled(SMALL, _COUNT, number + 100)
        with KVHost(bench, target, store) as host:
            _loaded(host, ids, tp_size=2)
        assert torch.equal(bits(target), _expected(source, source_ids, target, ids)), layout


def kv_stored_in_8_bits_differs_by_at_most_a_sixteenth(bench: Bench) -> None:
    """KV is saved in each layout as 8-bit floats, and loaded into another layout."""
    for number, layout in enumerate(LAYOUTS):
        dtype = DTYPES[number % 3]
        source = make_cache(SMALL, layout, dtype, bench.device)
        source.copy_(torch.randn(SMALL.shape, device=bench.device))
        store, source_ids = bench.folder(), shuffled(SMALL, _COUNT, number)
        with KVHost(bench, source, store, stored_dtype="fp8") as host:
            host.save(*chunks(source_ids, 3, SMALL.block_tokens, tail=_TAIL))
            host.settle()
        target = make_cache(SMALL, LAYOUTS[number - 1], dtype, bench.device)
        ids = shuffled(SMALL, _COUNT, number + 100)
        with KVHost(bench, target, store, stored_dtype="fp8") as host:
            _loaded(host, ids)
        expected = torch.zeros_like(target)
        bits(expected).copy_(_expected(source, source_ids, target, ids))
        error = (target.double() - expected.double()).abs()
        assert bool((error <= expected.double().abs() / 16 + 2**-14).all()), f"{dtype} {layout}"
        assert bool(target[:, ids].any()), "nothing was loaded"


def kv_saves_do_not_wait_for_the_device(bench: Bench) -> None:
    """A save stores what earlier kernels write, although they have not begun, and not what later
    kernels write: blocks may be overwritten at once.
    """
    for layout in LAYOUTS:
        cache, refilled, *filled = (
            bits(make_cache(SMALL, layout, torch.bfloat16, bench.device)) for _ in range(4)
        )
        ids, store = shuffled(SMALL, 8, 0), bench.folder()
        with KVHost(bench, cache.view(torch.bfloat16), store) as host:
            for number, block in enumerate(bench.rounds()):
                fill(filled[number], number)
                pieces = chunks(ids, 2, SMALL.block_tokens, prompt=str(number))
                with block:
                    cache.copy_(filled[number], non_blocking=True)
                    host.save_leaving(*pieces[:2])
                    host.save(*pieces[2:])
                    cache.copy_(refilled, non_blocking=True)
                    host.end_step()
                    host.counts()
                if number:
                    bench.finish()  # as if the threads that store were late
                host.settle()
                bench.finish()
        target = make_cache(SMALL, layout, torch.bfloat16, bench.device)
        with KVHost(bench, target, store) as host:
            for number, expected in enumerate(filled):
                host.load("r", *chunks(ids, 2, SMALL.block_tokens, prompt=str(number)))
                assert not host.settle().invalid_blocks
                assert torch.equal(bits(target)[:, ids], expected[:, ids]), layout


def kernels_write_where_saves_read(bench: Bench) -> None:
    """Kernels write tokens to where saves read them, in each layout: engines with different layouts
    read each other's blocks. Trying the kernels changes nothing in the cache.
    """
    for number, layout in enumerate(LAYOUTS):
        dtype, other = DTYPES[number % 3], LAYOUTS[number - 1]
        source, target = (make_cache(SMALL, each, dtype, bench.device) for each in (layout, other))
        source.copy_(torch.randn(SMALL.shape, device=bench.device))
        before, store = bits(source).clone(), bench.folder()
        ids = shuffled(SMALL, _COUNT, number)
        with KVHost(bench, source, store, kernels=Kernels()) as host:
            assert torch.equal(bits(source), before), layout
            host.save(*chunks(ids, 3, SMALL.block_tokens))
            host.settle()
        with KVHost(bench, target, store, kernels=Kernels()) as host:
            host.load("r", *chunks(ids, 3, SMALL.block_tokens))
            assert not host.settle().invalid_blocks, f"{layout} to {other}"
        assert torch.equal(bits(target)[:, ids], before[:, ids]), f"{layout} to {other}"


def unexpected_block_layout_is_refused(bench: Bench) -> None:
    """An engine whose blocks have another layout than expected must not store them."""
    cache = make_cache(SMALL, "LBNHC", torch.bfloat16, bench.device)
    try:
        KVHost(bench, cache, bench.folder(), kernels=Kernels(misplaced=-1))
    except CacheRefused:
        return
    raise AssertionError("the cache is not refused")


def kv_loads_do_not_wait_for_the_device(bench: Bench) -> None:
    """Loads do not block, but their copies run after the kernels that vLLM launched before."""
    source = make_cache(SMALL, "LBHNC", torch.bfloat16, bench.device)
    fill(source, 1)
    ids, store, host_cache = list(range(8)), bench.folder(), bench.folder()
    pieces = chunks(ids, 4, SMALL.block_tokens)
    target = make_cache(SMALL, "LBHNC", torch.bfloat16, bench.device)
    before = torch.zeros_like(bits(target))
    with (
        KVHost(bench, source, store, host_cache=host_cache) as writer,
        KVHost(bench, target, store, host_cache=host_cache) as reader,
    ):
        writer.save(*pieces)
        writer.settle()
        for number, block in enumerate(bench.rounds()):
            bits(target).fill_(7)
            with block:
                # Earlier kernels still use the blocks; our copies run after them.
                bits(target).copy_(before, non_blocking=True)
                reader.load(str(number), *pieces)
                reader.wait_idle()
                is_early = reader.end_step().requests and number and bench.is_gpu
                assert not is_early, "reported before the copies had run"
            assert not reader.settle().invalid_blocks
            bench.finish()
    assert torch.equal(bits(target)[:, ids], bits(source)[:, ids])
    assert not bits(target)[:, len(ids) :].any()


def unregistered_cache_is_not_accessed(bench: Bench) -> None:
    """`unregister` returns only when no copy is in flight. Until `restore`, loads fail."""
    source = make_cache(SMALL, "LBHNC", torch.bfloat16, bench.device)
    fill(source, 1)
    before, store, ids = bits(source).clone(), bench.folder(), list(range(6))
    pieces = chunks(ids, 3, SMALL.block_tokens)
    with KVHost(bench, source, store) as host:
        bench.finish()
        bench.keep_busy()
        host.save(*pieces)
        host.worker.unregister()
        with bench.aside():  # the next owner of the memory does not wait for vLLM's stream
            bits(source).zero_()
        bench.finish()
        host.settle()
        host.load("asleep", *pieces)
        assert host.settle().invalid_blocks == set(ids)
        assert not bits(source).any()
        host.worker.restore()
        host.load("awake", *pieces)
        assert not host.settle().invalid_blocks
    assert torch.equal(bits(source)[:, ids], before[:, ids])


CHECKS: tuple[Check, ...] = (
    kv_is_unchanged_in_every_layout_and_dtype,
    one_rank_loads_kv_of_two_ranks,
    kv_stored_in_8_bits_differs_by_at_most_a_sixteenth,
    kernels_write_where_saves_read,
    unexpected_block_layout_is_refused,
    kv_saves_do_not_wait_for_the_device,
    kv_loads_do_not_wait_for_the_device,
    unregistered_cache_is_not_accessed,
)
