# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of sharing on a GPU: the time of the worker halves' hooks, and their copies'
share of the link between host and device.

    python -m benchmarks.gpu

It needs torch, and no vLLM. Without a GPU it times hooks on a CPU that stands in for one, with a
driver that does nothing, and the link is a copy of host memory.
"""

import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from lab.gpu_kit import vllm_names

vllm_names.provide()

from benchmarks import report  # noqa: E402 - what follows may import names of vLLM
from benchmarks.measure import Readings, percentile  # noqa: E402
from benchmarks.report import Report, Table  # noqa: E402
from lab.gpu_kit import link  # noqa: E402
from lab.gpu_kit.kit import Bench  # noqa: E402
from lab.gpu_kit.layouts import EIGHT_B, Sizes, make_cache  # noqa: E402
from lab.gpu_kit.workers import MIB, KVHost, chunks, shuffled  # noqa: E402

# Hooks cost the same for few bytes a block as for many, but a CPU copies these.
_HOOK_SIZES = replace(EIGHT_B, content=8)
_SAVE, _LOAD, _END = "order saves", "order loads", "end of step"


def hook_times(bench: Bench, rounds: int) -> Table:
    """Time all hooks of a step that saves and loads 8,192 tokens of an 8B-class model."""
    note = (
        f"A step of an 8B-class model: {EIGHT_B.blocks * EIGHT_B.block_tokens} tokens in "
        f"{EIGHT_B.blocks // link.CHUNK_BLOCKS} chunks are ordered to be saved and as many to be "
        "loaded. `end of step`: jobs of before are looked after, and what vLLM asks is told. "
    )
    note += "" if bench.is_gpu else "There is no device: the driver's own time is not in it."
    table = Table(
        "Hooks of the worker thread, milliseconds a step",
        ("layout", "blocks", "hook", "median", "p95"),
        note,
    )
    for layout in ("LBHNC", "BHLNC"):
        for order in ("in order", "in no order"):
            times = _timed_steps(bench, layout, order, rounds)
            for hook in (_SAVE, _LOAD, _END):
                late = percentile(times.values(hook), 95)
                table.add(layout, order, hook, 1e3 * times.median(hook), 1e3 * late)
            hooks = [times.values(hook) for hook in (_SAVE, _LOAD, _END)]
            sums = [sum(step) for step in zip(*hooks, strict=True)]
            middle, late = percentile(sums, 50), percentile(sums, 95)
            table.add(layout, order, "all", 1e3 * middle, 1e3 * late)
    return table


def _timed_steps(bench: Bench, layout: str, order: str, rounds: int) -> Readings[str]:
    sizes, times = _HOOK_SIZES, Readings[str]()
    ids = list(range(sizes.blocks)) if order == "in order" else shuffled(sizes, sizes.blocks, 1)
    cache = make_cache(sizes, layout, torch.bfloat16, bench.device)
    store, host_cache = bench.folder(), bench.folder()
    with KVHost(bench, cache, store, host_cache=host_cache, buffer_bytes=256 * MIB) as host:
        stored = chunks(ids, link.CHUNK_BLOCKS, sizes.block_tokens, prompt="stored")
        host.save(*stored)
        host.settle()
        for number in range(rounds + 1):
            step = times if number else Readings[str]()  # the first round warms up
            saves = chunks(ids, link.CHUNK_BLOCKS, sizes.block_tokens, prompt=str(number))
            with step.timed(_SAVE):
                host.save(*saves)
            with step.timed(_LOAD):
                host.load(str(number), *stored)
            with step.timed(_END):
                host.end_step()
                host.counts()
            assert not host.settle().invalid_blocks
    return times


def link_shares(bench: Bench, sizes: Sizes, rounds: int) -> Table:
    """Measure the throughput of our copies as a share of the link's in the same run."""
    seconds = Readings[link.What]()
    num_bytes: dict[link.What, int] = {}
    for number in range(rounds + 1):
        for what, moved in link.copies(bench, sizes).items():
            num_bytes[what] = moved.num_bytes
            if number:  # the first round warms up
                seconds.add(what, moved.seconds)
    table = Table(
        "Copies between host and device",
        ("copies", "direction", "MB", "GB/s", "share of the link"),
        "KV: from the order until the blocks are copied; loads are read from the host cache, and "
        f"checked. Embeddings: {link.PICTURES} in a step, until the device is done.",
    )
    rates = {what: num_bytes[what] / seconds.median(what) / 1e9 for what in num_bytes}
    for what, rate in rates.items():
        name, direction = what
        share = rate / rates[link.PLAIN, direction]
        table.add(name, direction, round(num_bytes[what] / 1e6), rate, share)
    return table


@contextmanager
def _stand_in_for_a_gpu() -> Iterator[None]:
    """Have this CPU stand in for a GPU whose driver copies nothing."""
    import pytest

    from kvshare.worker import blocks
    from lab.gpu_stand_in import stand_in

    def copy(*_: object) -> None:
        pass

    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        patch.setattr(blocks, "device_copier", lambda: copy)
        yield


def main() -> int:
    """Run the program; return its exit status."""
    parser = report.arguments(__doc__ or "", "benchmarks.gpu")
    options = parser.parse_args()
    # Without vLLM the workers log that there are no attention layers to check.
    logging.getLogger("kvshare").setLevel(logging.ERROR)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    rounds = options.rounds or (2 if options.quick else 20)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    settings = {"device": name, "rounds": rounds}
    result = Report("gpu", report.command_line("benchmarks.gpu", options), settings)
    with ExitStack() as stack:
        bench = Bench(device, Path(stack.enter_context(_memory_folder())))
        with ExitStack() as hooks:
            if not bench.is_gpu:
                hooks.enter_context(_stand_in_for_a_gpu())
            result.add(hook_times(bench, rounds))
        sizes = EIGHT_B if bench.is_gpu else replace(EIGHT_B, blocks=64)
        result.add(link_shares(bench, sizes, min(rounds, 5)))
    print(f"\nWritten to {result.write(options.results)}")
    return 0


def _memory_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder in memory, if possible: host caches are usually there."""
    memory = Path("/dev/shm")  # noqa: S108
    return tempfile.TemporaryDirectory(prefix="bench-", dir=memory if memory.is_dir() else None)


if __name__ == "__main__":
    sys.exit(main())
