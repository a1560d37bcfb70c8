# SPDX-License-Identifier: Apache-2.0
"""Faults of the store cost hits, and never a wrong token, a request or the engine."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ecshare.store.format import TensorSpec, seal
from ecshare.store.keys import Kind, manifests_prefix, object_key
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.stats import summed
from tests.kvshare.conftest import StartEngine, is_at_rest, spin
from tests.kvshare.damage import empty, flip_a_payload_bit, replace, truncate
from tests.kvshare.gated import GatedFileSystem
from tests.kvshare.toy import (
    BLOCK,
    HEADS,
    LAYERS,
    ToyEngine,
    ToyModel,
    chunks_for,
    expected_answer,
    make_request,
    objects,
    serve,
)

PROMPT = list(range(100, 100 + 5 * BLOCK + 3))
NUM_CHUNKS = 6
FIRST, MIDDLE, TAIL = 0, 2, NUM_CHUNKS - 1


def chunk_path(engine: ToyEngine, folder: Path, index: int) -> Path:
    """Return the file of chunk number `index` of PROMPT in the store."""
    chunk = chunks_for(make_request("x", PROMPT))[index]
    (manifest,) = (folder / "store" / manifests_prefix(Kind.KV)).iterdir()
    return folder / "store" / object_key(Kind.KV, manifest.name, bytes(chunk.key), "t0of1")


@pytest.fixture
def warm(start: StartEngine, tmp_path: Path) -> Path:
    """Store PROMPT and remove the host cache; return the folder."""
    serve(start(), PROMPT, max_tokens=1)
    shutil.rmtree(tmp_path / "host")
    assert len(objects(tmp_path)) == NUM_CHUNKS
    return tmp_path


def unlink(path: Path) -> None:
    path.unlink()


def swap_in_another_chunk(path: Path) -> None:
    """Replace it by a valid object of the right shape for other tokens."""
    other = next(one for one in path.parent.parent.rglob("*.t0of1") if one != path)
    replace(path, other.read_bytes())


def put_other_tensor(path: Path) -> None:
    facts = TensorSpec(dtype="F32", shape=(HEADS, LAYERS, BLOCK, 4), attributes={})
    slab = Staging(torch.device("cpu"), 1 << 20).reserve(facts)
    assert slab is not None
    slab.payload.zero_()
    seal(slab.body, facts, str(path).partition("/store/")[2])
    replace(path, slab.body)


FAULTS = [unlink, flip_a_payload_bit, truncate, empty, swap_in_another_chunk, put_other_tensor]


@pytest.mark.parametrize("index", [FIRST, MIDDLE, TAIL])
@pytest.mark.parametrize("fault", FAULTS)
def test_chunk_damaged_between_lookup_and_load_is_recomputed(
    start: StartEngine, warm: Path, fault: Callable[[Path], None], index: int
) -> None:
    engine = start()
    engine.before_load = lambda: fault(chunk_path(engine, warm, index))
    answer = serve(engine, PROMPT)
    assert answer.computed_prompt_tokens == len(PROMPT) - index * BLOCK, (
        "chunks before it are loaded"
    )
    assert engine.counts["blocks/failed"] == 1
    assert engine.counts[f"misses/{'missing' if fault is unlink else 'corrupt'}"] == 1
    assert engine.counts.get("tokens/loaded", 0) == index * BLOCK
    # The recomputed chunk is in this host's cache now, even if the store keeps the damaged one.
    engine.before_load = lambda: None
    assert serve(engine, PROMPT, name="again").computed_prompt_tokens == 1
    assert serve(start(), PROMPT).computed_prompt_tokens == 1


def test_prompt_is_recomputed_from_the_first_of_two_lost_chunks(
    start: StartEngine, warm: Path
) -> None:
    engine = start()

    def lose_two() -> None:
        for index in (1, 4):
            chunk_path(engine, warm, index).unlink()

    engine.before_load = lose_two
    assert serve(engine, PROMPT, max_tokens=1).computed_prompt_tokens == len(PROMPT) - BLOCK
    assert engine.counts["tokens/loaded"] == BLOCK
    assert is_at_rest(engine)
    assert len(objects(warm)) == NUM_CHUNKS, "both were saved again"


@pytest.mark.parametrize("index", [FIRST, MIDDLE, TAIL])
def test_chunk_lost_before_lookup_is_recomputed_and_saved(
    start: StartEngine, warm: Path, index: int
) -> None:
    engine = start()
    chunk_path(engine, warm, index).unlink()
    answer = serve(engine, PROMPT, max_tokens=1)
    assert answer.computed_prompt_tokens == len(PROMPT) - index * BLOCK
    assert engine.counts["blocks/missed"] == NUM_CHUNKS - index
    assert engine.counts["misses/missing"] == NUM_CHUNKS - index
    num_loads = int(index > FIRST)
    sums = summed(engine.counts)
    assert sums["wait_seconds/look_up_count"] == 1
    assert sums.get("wait_seconds/load_count", 0) == num_loads
    assert ("wait_seconds/load_sum" in sums) is bool(num_loads)
    assert len(objects(warm)) == NUM_CHUNKS, "saved again"


# --- a store that is slow or gone ---


@pytest.mark.parametrize("operation", ["exists", "get"])
def test_hanging_store_delays_a_request_for_a_bounded_time(
    gated: StartEngine, operation: str
) -> None:
    serve(gated(), PROMPT)
    engine = gated("kv_consumer", io_timeout_s=1.0)
    GatedFileSystem.close_gate(operation)
    assert serve(engine, PROMPT).computed_prompt_tokens == len(PROMPT)
    assert engine.counts["misses/unavailable"] > 0
    stage = "look_up" if operation == "exists" else "load"
    assert summed(engine.counts)[f"wait_seconds/{stage}_sum"] >= 1.0
    assert is_at_rest(engine)


@pytest.mark.parametrize("operation", ["exists", "get", "put"])
def test_failing_store_operation_is_counted_and_request_ends(
    gated: StartEngine, operation: str
) -> None:
    serve(gated(), PROMPT)
    engine = gated()
    GatedFileSystem.broken.add(operation)
    computed = serve(engine, PROMPT).computed_prompt_tokens
    assert computed == (1 if operation == "put" else len(PROMPT))
    event = {"exists": "missed", "get": "failed", "put": "dropped"}[operation]
    assert engine.counts[f"blocks/{event}"] > 0
    assert ("misses/unavailable" in engine.counts) is (operation != "put")
    assert is_at_rest(engine)


def test_failed_save_is_repeated_by_a_later_request(gated: StartEngine) -> None:
    engine = gated()
    GatedFileSystem.broken.add("put")
    serve(engine, PROMPT[:3], max_tokens=1, name="one")
    assert engine.counts["blocks/dropped"] == 1
    GatedFileSystem.broken.clear()
    serve(engine, PROMPT[:3], max_tokens=1, name="two")
    assert serve(gated(), PROMPT[:3]).computed_prompt_tokens == 1


def test_saves_beyond_buffer_bytes_are_dropped_and_repeated_later(gated: StartEngine) -> None:
    engine = gated(buffer_bytes=1)
    GatedFileSystem.close_gate("put")
    engine.add(make_request("one", PROMPT, 1))
    spin(engine, lambda: not engine.scheduler.has_unfinished_requests(), "no answer")
    GatedFileSystem.open_gates()
    engine.run_out()
    assert engine.counts["blocks/dropped"] == NUM_CHUNKS - 1
    for number in range(NUM_CHUNKS):
        serve(engine, PROMPT, max_tokens=1, name=f"r{number}")
    assert serve(gated(), PROMPT).computed_prompt_tokens == 1


# --- aborts ---


def test_abort_during_lookup_leaves_nothing(gated: StartEngine) -> None:
    engine = gated()
    GatedFileSystem.close_gate("exists")
    engine.add(make_request("r", PROMPT))
    engine.step()
    engine.abort("r")
    GatedFileSystem.open_gates()
    engine.run_out()
    assert is_at_rest(engine)


@pytest.mark.parametrize("loses", [False, True])
def test_abort_during_load_frees_blocks_and_discards_late_data(
    gated: StartEngine, loses: bool
) -> None:
    """vLLM gets the blocks back before the store responds; late data is not written to them."""
    serve(gated(), PROMPT)
    engine = gated("kv_consumer")
    pool = engine.scheduler.kv_cache_manager.block_pool
    GatedFileSystem.close_gate("get")
    engine.add(make_request("r", PROMPT))
    spin(engine, lambda: pool.get_usage() > 0, "no load is ordered")
    engine.abort("r")
    assert pool.get_usage() > 0, "a worker may still write to them"
    engine.step()
    assert pool.get_usage() == 0
    if loses:
        GatedFileSystem.broken.add("get")
    GatedFileSystem.open_gates()
    serve(engine, PROMPT[::-1], name="in the same blocks")
    assert is_at_rest(engine)


def test_abort_during_save_still_stores_the_prompt(gated: StartEngine) -> None:
    engine = gated()
    GatedFileSystem.close_gate("put")
    engine.add(make_request("r", PROMPT, 50))
    spin(engine, lambda: len(engine.answers["r"].tokens) > 2, "no tokens")
    engine.abort("r")
    GatedFileSystem.open_gates()
    engine.run_out()
    assert is_at_rest(engine)
    assert serve(gated(), PROMPT).computed_prompt_tokens == 1


def test_aborting_one_of_two_requests_keeps_their_shared_load(gated: StartEngine) -> None:
    serve(gated(), PROMPT)
    engine = gated("kv_consumer")
    pool = engine.scheduler.kv_cache_manager.block_pool
    GatedFileSystem.close_gate("get")
    engine.add(make_request("one", PROMPT, 3))
    engine.add(make_request("two", PROMPT, 3))
    spin(engine, lambda: pool.get_usage() * 63 >= 2 * NUM_CHUNKS, "the loads are not ordered")
    engine.abort("one")
    GatedFileSystem.open_gates()
    engine.run_out()
    assert engine.answers["two"].tokens == expected_answer(PROMPT, 3)
    assert engine.answers["two"].computed_prompt_tokens == 1
    assert is_at_rest(engine)


# --- a worker that must refuse its cache ---


class OfUnknownShape(ToyModel):
    """Registers tensors of an unsupported shape instead of its real caches."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kv_caches = {name: torch.zeros(3, 3, 3) for name in self.kv_caches}


def test_engine_shares_nothing_if_its_worker_refuses_the_cache(
    start: StartEngine, tmp_path: Path
) -> None:
    engine = start(model=OfUnknownShape)
    serve(engine, PROMPT, max_tokens=1, name="one")
    assert serve(engine, PROMPT, max_tokens=1, name="two").kv_transfer_params is None
    assert objects(tmp_path) == []
