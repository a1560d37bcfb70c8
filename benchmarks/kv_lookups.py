# SPDX-License-Identifier: Apache-2.0
"""Time look-ups of the stored prefix of a long prompt."""

from collections.abc import Sequence
from contextlib import closing
from time import perf_counter

import torch
from vllm.utils.hashing import sha256
from vllm.v1.request import Request

from benchmarks import places
from benchmarks.kv_halves import BLOCK_TOKENS, prompt_of
from benchmarks.measure import Readings, wait_until
from benchmarks.places import Place
from benchmarks.report import Table
from ecshare.store.format import TensorSpec
from ecshare.store.keys import Kind, object_key
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Put
from kvshare.chunks.facts import KVFacts
from kvshare.chunks.prefix import Chunk, Grid, Prefix
from kvshare.config import OPTIONS_PATH, KVConfig
from kvshare.scheduler.scheduler import KVScheduler

NUM_TOKENS = 32768
NAMESPACE, PART = "0" * 32, "t0of1"
# The stored part of the prompt: nothing; a turn that ended within a chunk; everything.
STATES = {"nothing": 0.0, "the first 39 %": 0.39, "everything": 1.0}
_GIVE_UP_S = 60.0
_NOTE = (
    f"A prompt of {NUM_TOKENS} tokens, from the first question to the answer, asked every "
    "half a millisecond; another host stored what there is. A round trip is 32 keys at once."
)


def kv_lookups(found: Sequence[Place], chunk_tokens: Sequence[int], rounds: int) -> Table:
    """Time look-ups at all places, for chunks of these sizes."""
    columns = ("store", "chunk tokens", "stored", "tokens found", "first hook us", "answer ms")
    table = Table("Looking up a long prompt", columns, _NOTE)
    for place in found:
        for size in chunk_tokens:
            for number, (state, share) in enumerate(STATES.items()):
                table.add(place.name, size, state, *_looked_up(place, size, number, share, rounds))
    return table


def _looked_up(
    place: Place, chunk_tokens: int, seed: int, share: float, rounds: int
) -> tuple[int, float, float]:
    """Return the tokens found, and medians: the first hook in us, the look-up in ms."""
    grid = Grid(BLOCK_TOKENS, chunk_tokens // BLOCK_TOKENS)
    num_blocks = int(NUM_TOKENS * share) // BLOCK_TOKENS
    hashes = prompt_of(NUM_TOKENS, seed).block_hashes[:num_blocks]
    stored = Prefix(grid, tuple(hashes), None)
    chunks = [stored.whole(number) for number in range(stored.num_whole)]
    _store(place, [*chunks, *stored.partials(stored.num_whole)[:1]])
    readings: Readings[str] = Readings()
    found = 0
    for turn in range(rounds):
        found = _one(place, grid, seed, turn, readings)
    return found, 1e6 * readings.median("first"), 1e3 * readings.median("all")


def _one(place: Place, grid: Grid, seed: int, turn: int, readings: Readings[str]) -> int:
    with places.host_folder() as host:
        config = KVConfig(**place.options, host_cache_dir=str(host))
        facts = KVFacts(
            NAMESPACE, grid, (), 1, {1: (PART,)}, lambda *_: 0, sha256, saves=False, loads=True
        )
        with closing(KVScheduler(config, facts, TransferEngine(config, OPTIONS_PATH))) as half:
            # Another prompt first: it opens connections, as in a running engine.
            for prompt in (len(STATES), seed):
                request = prompt_of(NUM_TOKENS, prompt, name=str(turn))
                found, first_s, all_s = _asked(half, request)
    readings.add("first", first_s)
    readings.add("all", all_s)
    return found


def _asked(half: KVScheduler, request: Request) -> tuple[int, float, float]:
    """Return the answer, the seconds of the first hook, and those until the answer."""
    start_s = perf_counter()
    answer = half.num_loadable_tokens(request, 0)
    first_s = perf_counter() - start_s

    def is_known() -> bool:
        nonlocal answer
        answer = half.num_loadable_tokens(request, 0)
        return answer is not None

    wait_until(is_known, _GIVE_UP_S, every_s=0.0005)
    assert answer is not None
    return answer, first_s, perf_counter() - start_s


def _store(place: Place, chunks: Sequence[Chunk]) -> None:
    """Store one byte for each of `chunks`: look-ups check only existence."""
    with places.host_folder() as host:
        config = KVConfig(**place.options, host_cache_dir=str(host))
        engine = TransferEngine(config, OPTIONS_PATH)
        staging = Staging(torch.device("cpu"), 1 << 30)
        for chunk in chunks:
            slab = staging.reserve(TensorSpec("U8", (1,), {}))
            assert slab is not None
            engine.submit(Put(object_key(Kind.KV, NAMESPACE, bytes(chunk.key), PART), slab))
        engine.drain(_GIVE_UP_S)
        engine.close()
