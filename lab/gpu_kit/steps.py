# SPDX-License-Identifier: Apache-2.0
"""Checks of a step of 8,192 tokens of an 8B-class model: its waits and its costs.

Figures are noted, and not judged.
"""

import time
from dataclasses import replace

import torch

from lab.gpu_kit import link
from lab.gpu_kit.kit import Bench, Check
from lab.gpu_kit.layouts import EIGHT_B, make_cache
from lab.gpu_kit.workers import MIB, KVHost, chunks, shuffled

_LAYOUTS = ("LBHNC", "BHLNC")
"""The layouts with the fewest copies for each block, and with the most."""
_QUEUED_COPIES = 16_384
"""As many the driver takes while the device works, seen on an H200: with twice as many it waits."""


def large_saves_do_not_wait_for_the_device(bench: Bench) -> None:
    """The driver accepts all copies while the device works. Blocks are in random order, so that no
    copy covers two of them.
    """
    sizes = EIGHT_B if bench.is_gpu else replace(EIGHT_B, layers=2, blocks=64)
    for layout in _LAYOUTS:
        num_copies = sizes.layers * sizes.blocks * (sizes.heads if layout == "BHLNC" else 1)
        why_not = f"{num_copies} copies" if num_copies > _QUEUED_COPIES else ""
        cache = make_cache(sizes, layout, torch.bfloat16, bench.device)
        ids, ms = shuffled(sizes, sizes.blocks, 1), []
        room = cache.nbytes + MIB
        with KVHost(bench, cache, bench.folder(), buffer_bytes=room) as host:
            for number, block in enumerate(bench.rounds(unjudged=why_not)):
                pieces = chunks(ids, link.CHUNK_BLOCKS, sizes.block_tokens, prompt=str(number))
                with block:
                    began_s = time.perf_counter()
                    host.save(*pieces)
                    ms.append(1e3 * (time.perf_counter() - began_s))
                    host.end_step()
                host.settle()
            counts = host.counts()
        assert not counts.get("blocks/dropped"), "there was no room"
        if bench.is_gpu:
            idle, busy = ms
            bench.notes.append(
                f"{layout}: {cache.nbytes / MIB:.0f} MiB in {idle:.1f} ms of the hook while the "
                f"device is idle, {busy:.1f} ms while it works"
            )


def delay_of_kernels_by_saves_is_measured(bench: Bench) -> None:
    """Note the delay: a save's copies must end before later kernels overwrite its blocks."""
    bench.needs_gpu()
    for layout in _LAYOUTS:
        cache = make_cache(EIGHT_B, layout, torch.bfloat16, bench.device)
        room = cache.nbytes + MIB
        with KVHost(bench, cache, bench.folder(), buffer_bytes=room) as host:
            in_order, shuffle = list(range(EIGHT_B.blocks)), shuffled(EIGHT_B, EIGHT_B.blocks, 1)
            _held_up_ms(bench, host, in_order, "first")  # warms up
            for order, ids in (("in order", in_order), ("in no order", shuffle)):
                ms = _held_up_ms(bench, host, ids, order)
                bench.notes.append(
                    f"{layout}, blocks {order}: a kernel behind the save of "
                    f"{cache.nbytes / MIB:.0f} MiB begins {ms:.1f} ms later, "
                    f"{cache.nbytes / ms / 1e6:.1f} GB/s"
                )


def _held_up_ms(bench: Bench, host: KVHost, ids: list[int], prompt: str) -> float:
    """Save these blocks; return how much later vLLM's stream goes on."""
    pieces = chunks(ids, link.CHUNK_BLOCKS, EIGHT_B.block_tokens, prompt=prompt)
    before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    bench.finish()
    bench.keep_busy()  # until all is launched: the figure excludes the time of the hook
    before.record()
    host.save(*pieces)
    behind.record()
    bench.finish()
    host.settle()
    return float(before.elapsed_time(behind))


def copy_bandwidth_is_measured(bench: Bench) -> None:
    """Note the share of the link that copies use, measured once; see benchmarks.gpu for medians."""
    bench.needs_gpu()
    link.copies(bench, replace(EIGHT_B, blocks=link.CHUNK_BLOCKS))  # warms up
    found = link.copies(bench, EIGHT_B)
    for (what, direction), moved in found.items():
        share = moved.rate / found[link.PLAIN, direction].rate
        bench.notes.append(f"{what} {direction}: {moved.rate / 1e9:.1f} GB/s, {share:.0%} of plain")


CHECKS: tuple[Check, ...] = (
    large_saves_do_not_wait_for_the_device,
    delay_of_kernels_by_saves_is_measured,
    copy_bandwidth_is_measured,
)
