# SPDX-License-Identifier: Apache-2.0
"""The scheduler half alone: lookups, loads, announcements, and the saves that it orders."""

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

import kvshare.chunks.recent_keys as module
from ecshare.store.format import TensorSpec
from ecshare.store.keys import Key, Kind, object_key, tp_size_key
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Outcome, Put
from kvshare.chunks.facts import KVFacts
from kvshare.chunks.layers import AttentionWindow, LayerSet, has_states, state_names_of
from kvshare.chunks.prefix import Chunk, Grid
from kvshare.chunks.slabs import slab_sizes
from kvshare.config import KVConfig
from kvshare.messages import Orders, Report, announced_tokens, announcement
from kvshare.scheduler import lookups
from kvshare.scheduler.scheduler import KVScheduler
from tests.ecshare.upkeep.stores import taken
from tests.kvshare.gated import GatedFileSystem
from tests.kvshare.toy import BLOCK, chunks_for, make_request

NAMESPACE = "0" * 32
PROMPT = list(range(3 * BLOCK + 2))
NUM_CHUNKS = 4
_PAUSE_S = 0.001
SLAB = slab_sizes([1])(0, 1)
FULL = LayerSet(0, (0,), (("layers.0", 0),), AttentionWindow(), 1, 1)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A scheduler half with its store and a simulated clock."""

    def __init__(
        self,
        tmp_path: Path,
        parts: tuple[str, ...] = ("t0of1",),
        chunk_blocks: int = 1,
        layer_sets: tuple[LayerSet, ...] = (FULL,),
        other_tp_sizes: dict[int, tuple[str, ...]] | None = None,
        options: dict[str, Any] | None = None,
        **roles: Any,
    ) -> None:
        times = {"wait_s": 5.0, "io_timeout_s": 20.0}
        self.config = KVConfig(
            url="gated://bucket",
            host_cache_dir=f"{tmp_path}/host",
            **(times | (options or {})),
        )
        self.clock = Clock()
        self.engine = TransferEngine(self.config, "options")
        flags: dict[str, Any] = {"saves": True, "loads": True} | roles
        grid = Grid(BLOCK, chunk_blocks, has_states=has_states(layer_sets))
        flags["state_names"] = state_names_of(layer_sets, 1)
        sizes = {1: parts, **(other_tp_sizes or {})}
        block_bytes = slab_sizes([1] * len(layer_sets))
        facts = KVFacts(NAMESPACE, grid, layer_sets, 1, sizes, block_bytes, sha256, **flags)
        self.half = KVScheduler(self.config, facts, self.engine, self.clock)

    def put(self, chunks: Sequence[Chunk], part: str = "t0of1") -> None:
        """Store dummy objects under the keys of `chunks`, which is enough for lookups."""
        keys = (object_key(Kind.KV, NAMESPACE, bytes(chunk.key), part) for chunk in chunks)
        self.put_keys(*keys)

    def put_keys(self, *keys: Key) -> None:
        engine = TransferEngine(self.config, "options")
        staging = Staging(torch.device("cpu"), 1 << 24)
        for key in keys:
            slab = staging.reserve(TensorSpec("U8", (1,), {}))
            assert slab is not None
            engine.submit(Put(key, slab))
        outcomes = [done.outcome for done in engine.drain(20.0)]
        assert outcomes == [Outcome.OK] * len(keys)
        engine.close()

    def forget_host_cache(self) -> None:
        for path in Path(self.config.host_cache_dir or "").rglob("*"):
            if path.is_file():
                path.unlink()

    def ask(self, request: Request, num_computed_tokens: int = 0) -> int:
        """Ask until there is an answer, while the simulated clock stands still."""
        while (answer := self.half.num_loadable_tokens(request, num_computed_tokens)) is None:
            assert self.engine.in_flight, "it waits for nothing"
            self.engine.drain(_PAUSE_S)
        return answer

    def run(self, request: Request, start: int, end: int, block_ids: list[int]) -> Orders:
        """Schedule a new `request` to compute tokens `start` to `end`."""
        self.half.allocated(request, [], 0)
        request.num_computed_tokens = end
        new = NewRequestData(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=[],
            sampling_params=None,
            pooling_params=None,
            block_ids=(block_ids,),
            num_computed_tokens=start,
            lora_request=None,
        )
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs.append(new)
        output.num_scheduled_tokens[request.request_id] = end - start
        output.total_num_scheduled_tokens = end - start
        return self.half.orders(output)

    def go_on(self, request: Request, start: int, new_block_ids: list[int], **more: Any) -> Orders:
        """Schedule one more token of a running request."""
        request.num_computed_tokens = start + 1
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=[request.request_id],
            resumed_req_ids=more.get("resumed", set()),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[(new_block_ids,) if new_block_ids else None],
            num_computed_tokens=[start],
            num_output_tokens=[0],
        )
        output.num_scheduled_tokens[request.request_id] = 1
        output.total_num_scheduled_tokens = 1
        return self.half.orders(output)


StartBench = Callable[..., Bench]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[StartBench]:
    init_none_hash(sha256)
    started: list[Bench] = []

    def start(**more: Any) -> Bench:
        started.append(Bench(tmp_path, **more))
        return started[-1]

    yield start
    GatedFileSystem.open_gates()
    for one in started:
        one.half.close()
    GatedFileSystem.reset()


def chunks_of(prompt: list[int], chunk_blocks: int = 1) -> tuple[Chunk, ...]:
    """Return all chunks of `prompt`."""
    return chunks_for(make_request("x", prompt), chunk_blocks)


# --- look-ups ---


def test_only_an_idle_step_waits_for_a_lookup(
    bench: StartBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, waits = bench(), Counter[str]()
    monkeypatch.setattr(here.engine, "wait_idle", lambda: waits.update(["now"]))
    here.half.orders(SchedulerOutput.make_empty())
    GatedFileSystem.close_gate("exists")
    asked = make_request("asked", PROMPT)
    assert here.half.num_loadable_tokens(asked, 0) is None
    here.run(make_request("other", PROMPT[: BLOCK // 2]), 0, BLOCK // 2, [1])
    assert not waits, "it would delay the other request"
    assert here.half.orders(SchedulerOutput.make_empty()).is_idle
    assert waits["now"] == 1
    GatedFileSystem.open_gates()
    here.ask(asked)
    here.half.orders(SchedulerOutput.make_empty())
    assert waits["now"] == 1, "no request waits for a lookup"


def test_idle_step_waits_for_an_adapter_fingerprint(
    bench: StartBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, waits = bench(), Counter[str]()
    monkeypatch.setattr(here.engine, "wait_idle", lambda: waits.update(["now"]))
    lora = LoRARequest("tuned", 1, str(tmp_path))
    assert here.half.num_loadable_tokens(make_request("r", PROMPT, lora_request=lora), 0) is None
    here.half.orders(SchedulerOutput.make_empty())
    assert waits["now"] == 1


def test_lookup_returns_the_longest_stored_prefix(bench: StartBench) -> None:
    here = bench()
    chunks = chunks_of(PROMPT)
    here.put([chunks[0], chunks[1], chunks[3]])
    assert here.ask(make_request("r", PROMPT)) == 2 * BLOCK


def test_lookup_does_not_count_the_local_hit(bench: StartBench) -> None:
    here = bench()
    here.put(chunks_of(PROMPT))
    assert here.ask(make_request("r", PROMPT), BLOCK) == len(PROMPT) - 1 - BLOCK


def test_chunk_is_found_only_with_all_its_shards(bench: StartBench) -> None:
    here = bench(parts=("t0of2", "t1of2"))
    chunks = chunks_of(PROMPT)
    here.put(chunks, "t0of2")
    assert here.ask(make_request("one", PROMPT)) == 0
    here.put(chunks[:2], "t1of2")
    assert here.ask(make_request("two", PROMPT)) == 2 * BLOCK


def test_lookup_does_not_block_and_ends_after_wait_s(bench: StartBench) -> None:
    here = bench()
    GatedFileSystem.close_gate("exists")
    request = make_request("r", PROMPT)
    assert here.half.num_loadable_tokens(request, 0) is None
    assert here.half.num_loadable_tokens(request, 0) is None
    here.clock.now_s += here.config.wait_s
    assert here.half.num_loadable_tokens(request, 0) == 0, "the deadline has passed"


def test_request_joining_a_timed_out_lookup_gets_a_new_one(bench: StartBench) -> None:
    here = bench(options={"io_timeout_s": 0.5, "wait_s": 20.0})
    here.put(chunks_of(PROMPT))
    here.forget_host_cache()
    first, second = (make_request(name, PROMPT) for name in ("first", "second"))
    GatedFileSystem.close_gate("exists")
    assert here.half.num_loadable_tokens(first, 0) is None
    assert here.half.num_loadable_tokens(second, 0) is None
    assert here.engine.in_flight == 1, "two requests share one look-up"
    assert len(here.engine.drain(20.0)) == 1
    GatedFileSystem.open_gates()
    assert here.half.num_loadable_tokens(first, 0) == 0
    assert here.ask(second) == len(PROMPT) - 1


def test_request_joining_a_failed_lookup_does_not_repeat_it(bench: StartBench) -> None:
    here = bench()
    GatedFileSystem.broken.add("exists")
    first, second = (make_request(name, PROMPT) for name in ("first", "second"))
    assert here.half.num_loadable_tokens(first, 0) is None
    assert here.half.num_loadable_tokens(second, 0) is None
    here.engine.drain(20.0)
    assert here.half.num_loadable_tokens(first, 0) == 0
    assert here.half.num_loadable_tokens(second, 0) == 0
    assert not here.engine.in_flight


def test_late_lookup_result_does_not_change_the_answer(bench: StartBench) -> None:
    here = bench()
    here.put(chunks_of(PROMPT))
    request = make_request("r", PROMPT)
    here.forget_host_cache()
    GatedFileSystem.close_gate("exists")
    assert here.half.num_loadable_tokens(request, 0) is None
    here.clock.now_s += here.config.wait_s
    assert here.half.num_loadable_tokens(request, 0) == 0
    GatedFileSystem.open_gates()
    while here.engine.in_flight:
        assert here.half.num_loadable_tokens(request, 0) == 0
    assert here.half.num_loadable_tokens(request, 0) == 0
    assert here.ask(make_request("next", PROMPT)) == len(PROMPT) - 1


def test_shrunken_local_hit_causes_a_new_lookup(bench: StartBench) -> None:
    """vLLM may ask again before it admits the request, with fewer local blocks."""
    here = bench()
    here.put(chunks_of(PROMPT))
    request = make_request("r", PROMPT)
    assert here.ask(request, 2 * BLOCK) == len(PROMPT) - 1 - 2 * BLOCK
    assert here.half.num_loadable_tokens(request, 3 * BLOCK) == len(PROMPT) - 1 - 3 * BLOCK
    assert here.ask(request, 0) == len(PROMPT) - 1


def test_request_that_skips_prefix_caches_is_not_looked_up(bench: StartBench) -> None:
    here = bench()
    here.put(chunks_of(PROMPT))
    request = make_request("r", PROMPT)
    request.skip_reading_prefix_cache = True
    assert here.half.num_loadable_tokens(request, 0) == 0
    assert here.engine.in_flight == 0


def test_load_targets_the_blocks_behind_the_local_hit(bench: StartBench) -> None:
    here = bench()
    chunks = chunks_of(PROMPT)
    here.put(chunks)
    request = make_request("r", PROMPT)
    tokens = here.ask(request, BLOCK)
    here.half.allocated(request, [[50, 51, 52, 53]], tokens)
    (order,) = here.half.orders(SchedulerOutput.make_empty()).loads
    assert order.request_id == "r"
    assert [(piece.key, piece.block_ids[0], piece.num_tokens) for piece in order.pieces] == [
        (chunks[1].key, (51,), BLOCK),
        (chunks[2].key, (52,), BLOCK),
        (chunks[3].key, (53,), 1),
    ]
    assert here.half.orders(SchedulerOutput.make_empty()).loads == (), "once"


def test_blocks_that_became_local_are_not_loaded(bench: StartBench) -> None:
    """The local hit grew after the lookup: other requests may read these blocks."""
    here = bench()
    chunks = chunks_of(PROMPT)
    here.put(chunks)
    request = make_request("r", PROMPT)
    here.ask(request, 0)
    here.half.allocated(request, [[50, 51, 52, 53]], here.ask(request, 2 * BLOCK))
    (order,) = here.half.orders(SchedulerOutput.make_empty()).loads
    assert [piece.block_ids[0] for piece in order.pieces] == [(52,), (53,)]


def test_vllm_may_allocate_fewer_tokens_than_offered(bench: StartBench) -> None:
    here = bench()
    here.put(chunks_of(PROMPT))
    request = make_request("r", PROMPT)
    here.ask(request)
    here.half.allocated(request, [[50, 51]], 2 * BLOCK)
    (order,) = here.half.orders(SchedulerOutput.make_empty()).loads
    assert [piece.block_ids[0] for piece in order.pieces] == [(50,), (51,)]


def test_vllm_may_ignore_the_offered_tokens(bench: StartBench) -> None:
    """Since 0.33 vLLM may load less than offered."""
    here = bench()
    here.put(chunks_of(PROMPT))
    request = make_request("r", PROMPT)
    here.ask(request)
    assert here.run(request, 0, len(PROMPT), [1, 2, 3, 4]).loads == ()
    here.half.finished(request)
    assert here.half.orders(SchedulerOutput.make_empty()).abandoned == (), "nothing was loading"


def test_vllm_may_admit_a_request_several_steps_later(bench: StartBench) -> None:
    """Since 0.33 a load may wait until steps in flight have last read its blocks."""
    here = bench()
    here.put(chunks_of(PROMPT))
    request = make_request("r", PROMPT)
    num_tokens = here.ask(request, BLOCK)
    other = make_request("other", PROMPT[1:])
    assert here.run(other, 0, len(PROMPT) - 1, [1, 2, 3, 4]).loads == ()
    here.clock.now_s += 3600
    here.half.reset()
    here.half.reported(KVConnectorOutput())
    assert here.half.orders(SchedulerOutput.make_empty()).loads == ()
    here.half.allocated(request, [[50, 51, 52, 53]], num_tokens)
    assert here.half.hit_sources(request, num_tokens) == {"host": num_tokens}
    (order,) = here.half.orders(SchedulerOutput.make_empty()).loads
    assert [piece.block_ids[0] for piece in order.pieces] == [(51,), (52,), (53,)]


def test_request_may_end_before_it_is_admitted(bench: StartBench) -> None:
    here = bench()
    here.put(chunks_of(PROMPT))
    request = make_request("r", PROMPT)
    assert here.ask(request)
    here.half.finished(request)
    orders = here.half.orders(SchedulerOutput.make_empty())
    assert (orders.loads, orders.abandoned) == ((), ()), "no worker has to report it"


def test_requests_with_a_common_prefix_share_a_lookup(bench: StartBench) -> None:
    here = bench()
    here.put(chunks_of(PROMPT))
    one, two = make_request("one", PROMPT), make_request("two", PROMPT)
    GatedFileSystem.close_gate("exists")
    here.forget_host_cache()
    assert here.half.num_loadable_tokens(one, 0) is None
    assert here.half.num_loadable_tokens(two, 0) is None
    assert here.engine.in_flight == 1
    GatedFileSystem.open_gates()
    assert here.ask(one) == here.ask(two) == len(PROMPT) - 1


def end_load(here: Bench, *lost: Chunk) -> None:
    """Report the load of request "r" as ended, without these chunks."""
    lost_keys = frozenset(chunk.key for chunk in lost)
    here.half.reported(KVConnectorOutput(kv_connector_worker_meta=Report(lost_keys)))
    here.half.reported(KVConnectorOutput(finished_recving={"r"}))


def test_load_with_a_lost_chunk_is_not_repeated(bench: StartBench) -> None:
    here = bench()
    chunks = chunks_of(PROMPT)
    here.put(chunks)
    request = make_request("r", PROMPT)
    here.half.allocated(request, [[1, 2, 3, 4]], here.ask(request))
    end_load(here, chunks[2])
    assert here.half.num_loadable_tokens(request, 0) == 0
    # vLLM has kept two blocks, and computes the rest.
    orders = here.run(request, 2 * BLOCK, len(PROMPT), [1, 2, 3, 4])
    assert saved(orders) == [(chunks[2].key, 3), (chunks[3].key, 4)]
    stats = here.half.take_stats()
    assert stats is not None
    assert stats.data["tokens/loaded"] == 2 * BLOCK


def test_prompt_of_a_failed_load_is_saved_whole(bench: StartBench) -> None:
    here = bench()
    here.put(chunks_of(PROMPT))
    request = make_request("r", PROMPT)
    here.half.allocated(request, [[1, 2, 3, 4]], here.ask(request))
    here.half.reported(KVConnectorOutput(finished_recving={"r"}, failed_recving={"r"}))
    assert here.half.num_loadable_tokens(request, 0) == 0
    assert len(here.run(request, 0, len(PROMPT), [1, 2, 3, 4]).saves) == NUM_CHUNKS


# --- chunks of several blocks ---


def pieces_of(orders: Orders) -> list[tuple[bytes, tuple[int, ...], int, int]]:
    return [
        (each.key, each.block_ids[0], each.num_tokens, each.first_block) for each in orders.saves
    ]


@pytest.mark.parametrize("in_tail", [0, 2])
def test_whole_chunks_and_the_end_of_a_prompt_are_saved(bench: StartBench, in_tail: int) -> None:
    here = bench(chunk_blocks=2)
    prompt = list(range(5 * BLOCK + in_tail + 1))
    first, second, end = chunks_of(prompt, 2)
    request = make_request("r", prompt)
    assert pieces_of(here.run(request, 0, len(prompt), [7, 8, 9, 5, 6, 4])) == [
        (first.key, (7, 8), 2 * BLOCK, 0),
        (second.key, (9, 5), 2 * BLOCK, 0),
        (end.key, (6, 4) if in_tail else (6,), BLOCK + in_tail, 0),
    ]
    assert (bytes(end.key) == request.block_hashes[4]) is (not in_tail)


def test_tail_is_saved_by_the_step_that_completes_the_prompt(bench: StartBench) -> None:
    here = bench(chunk_blocks=2)
    prompt = list(range(3 * BLOCK + 3))
    first, tail = chunks_of(prompt, 2)
    request = make_request("r", prompt)
    orders = here.run(request, 0, len(prompt) - 1, [7, 8, 9, 5])
    assert [each.key for each in orders.saves] == [first.key]
    assert pieces_of(here.go_on(request, len(prompt) - 1, [])) == [(tail.key, (9, 5), BLOCK + 2, 0)]


@pytest.mark.parametrize("numbers_media", [True, False])
@pytest.mark.parametrize("name", ["renderer0-mm-1-image-0", "a" * 64])
def test_kv_of_an_image_with_a_counter_as_identifier_is_not_shared(
    bench: StartBench, name: str, numbers_media: bool
) -> None:
    """Without caches vLLM numbers images from 1 in every engine, so identifiers collide."""
    here = bench(numbers_media=numbers_media)
    is_shared = name == "a" * 64 or not numbers_media
    prompt, blocks = list(range(5 * BLOCK + 1)), [1, 2, 3, 4, 5, 6]
    place = PlaceholderRange(offset=1, length=2)
    picture = MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)
    request = make_request("r", prompt, mm_features=[picture])
    here.put(chunks_for(request)[:2])
    assert here.ask(request) == (2 * BLOCK if is_shared else 0)
    assert len(here.run(request, 2 * BLOCK, len(prompt), blocks).saves) == 3 * is_shared
    assert (here.half.finished(request) is not None) is is_shared


def with_pictures(says: Any, *places: int, name: str = "r") -> Request:
    """Return a request with pictures "p0", "p1" at these places, of which a router `says` that they
    are new."""
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=f"p{number}",
            mm_position=PlaceholderRange(offset=place, length=2),
        )
        for number, place in enumerate(places)
    ]
    params = {"kvshare": {"for_decode": True, "new_media": says}}
    tokens = range(4 * BLOCK + 2)
    return make_request(name, tokens, mm_features=features, kv_transfer_params=params)


@pytest.mark.parametrize(
    ("says", "num_found"),
    [
        (["p1"], 2 * BLOCK),
        (["other", "p1", 7, None, ["p0"]], 2 * BLOCK),
        (["p1", "p0"], 0),
        (["other"], 4 * BLOCK + 1),
        ([], 4 * BLOCK + 1),
        # Not what a router sends.
        ("p0", 4 * BLOCK + 1),
        (None, 4 * BLOCK + 1),
        ({"p0": 1}, 4 * BLOCK + 1),
        (["p0"] * 1025, 4 * BLOCK + 1),
    ],
)
def test_what_follows_a_new_picture_is_not_looked_up(
    bench: StartBench, says: Any, num_found: int
) -> None:
    here = bench()
    request = with_pictures(says, 1, 2 * BLOCK + 1)
    here.put(chunks_for(request))
    assert here.ask(request) == num_found
    counts = here.engine.take_counts("scheduler")
    assert "blocks/missed" not in counts, "what is not looked up is not missed"


def test_nothing_is_asked_if_a_prompt_begins_with_a_new_picture(bench: StartBench) -> None:
    here = bench()
    assert here.half.num_loadable_tokens(with_pictures(["p0"], 1), 0) == 0
    assert here.half.num_loadable_tokens(with_pictures(["p1"], 1, name="old"), 0) is None


def test_a_preempted_request_finds_what_it_has_stored_of_a_new_picture(bench: StartBench) -> None:
    here = bench()
    request = with_pictures(["p0"], 1)
    here.put(chunks_for(request))
    request.num_preemptions = 1
    assert here.ask(request) == 4 * BLOCK + 1


def test_chunk_is_saved_when_its_last_block_is_full(bench: StartBench) -> None:
    here = bench(chunk_blocks=2)
    prompt = list(range(4 * BLOCK + 1))
    first, second = chunks_of(prompt, 2)
    request = make_request("r", prompt)
    assert pieces_of(here.run(request, 0, 2 * BLOCK - 1, [7, 8])) == []
    assert pieces_of(here.go_on(request, 2 * BLOCK - 1, [9])) == [(first.key, (7, 8), 8, 0)]
    assert pieces_of(here.go_on(request, 3 * BLOCK, [5])) == []
    assert pieces_of(here.go_on(request, 4 * BLOCK - 1, [6])) == [(second.key, (9, 5), 8, 0)]


def test_chunk_of_a_preempted_request_is_saved_from_its_new_blocks(bench: StartBench) -> None:
    here = bench(chunk_blocks=3)
    prompt = list(range(3 * BLOCK + 1))
    (chunk,) = chunks_of(prompt, 3)
    request = make_request("r", prompt)
    assert pieces_of(here.run(request, 0, 2 * BLOCK - 1, [7, 8])) == []
    output = SchedulerOutput.make_empty()
    output.preempted_req_ids = {"r"}
    (left,) = here.half.orders(output).leaving
    assert (bytes(left.key), left.block_ids[0]) == (request.block_hashes[0], (7,))
    orders = here.go_on(request, 3 * BLOCK - 1, [30, 31, 32], resumed={"r"})
    assert pieces_of(orders) == [(chunk.key, (30, 31, 32), 3 * BLOCK, 0)]
    assert orders.leaving == ()


def leave(here: Bench, request: Request) -> list[tuple[bytes, tuple[int, ...]]]:
    here.half.finished(request)
    orders = here.half.orders(SchedulerOutput.make_empty())
    assert here.half.orders(SchedulerOutput.make_empty()).leaving == (), "once"
    return [(piece.key, piece.block_ids[0]) for piece in orders.leaving]


def test_partial_chunk_is_saved_when_the_answer_ends(bench: StartBench) -> None:
    here = bench(chunk_blocks=4)
    request = make_request("r", PROMPT[: BLOCK + 1], 99)
    here.run(request, 0, BLOCK + 1, [7, 8, 9])
    request.append_output_token_ids(list(range(2 * BLOCK - 1)))
    here.go_on(request, 3 * BLOCK - 1, [])
    # The last token was just sampled: its KV is not computed, or only a guess.
    assert leave(here, request) == [(request.block_hashes[1], (7, 8))]


def test_chunk_completed_by_late_async_tokens_is_saved_at_the_end(
    bench: StartBench,
) -> None:
    here = bench(chunk_blocks=2)
    request = make_request("r", PROMPT[:BLOCK], 99)
    here.run(request, 0, BLOCK, [7, 8])
    assert here.go_on(request, 2 * BLOCK - 1, [9]).saves == (), "not known yet"
    request.append_output_token_ids(list(range(BLOCK + 1)))
    assert leave(here, request) == [(request.block_hashes[1], (7, 8))]


def test_memory_is_reserved_for_one_object_at_the_end_of_a_prompt(bench: StartBench) -> None:
    here = bench(chunk_blocks=4)
    prompt = list(range(6 * BLOCK + 3))
    here.run(make_request("r", prompt), 0, 4 * BLOCK, [1, 2, 3, 4])
    assert here.half.reserved_bytes == 2 * SLAB, "the whole chunk, and the tail"


def test_answer_without_kv_causes_no_save(bench: StartBench) -> None:
    here = bench(chunk_blocks=4)
    request = make_request("r", PROMPT, 9)
    assert len(here.run(request, 0, len(PROMPT), [1, 2, 3, 4]).saves) == 1
    request.append_output_token_ids([1])
    assert leave(here, request) == []


def test_only_an_answer_that_fills_a_block_saves_the_blocks_after_the_last_whole_chunk(
    bench: StartBench,
) -> None:
    here = bench(chunk_blocks=8)
    num_left = BLOCK - len(PROMPT) % BLOCK  # that the last block of the prompt has room for
    for num_answered, num_saved in ((num_left, 0), (num_left + 1, 1)):
        request = make_request(f"{num_answered}", PROMPT, 9)
        here.run(request, 0, len(PROMPT), [1, 2, 3, 4])
        for token in range(num_answered):
            request.append_output_token_ids([token])
            if token < num_answered - 1:  # the KV of the last one is not computed
                here.go_on(request, len(PROMPT) + token, [])
        assert len(leave(here, request)) == num_saved
        assert "blocks/dropped" not in here.engine.take_counts("scheduler")


def test_block_with_a_retracted_token_is_not_saved(bench: StartBench) -> None:
    """In a resumed session the user's next tokens replace vLLM's last token, whose KV was computed
    ahead: the block does not match its hash."""
    here = bench(chunk_blocks=4)
    request = make_request("r", PROMPT[: BLOCK + 1], 99)
    here.run(request, 0, BLOCK + 1, [7, 8])
    request.append_output_token_ids(list(range(BLOCK - 1)))
    here.go_on(request, 2 * BLOCK - 1, [])
    request.num_computed_tokens = 2 * BLOCK - 1
    request.append_output_token_ids([1, 2])
    assert leave(here, request) == []


def test_each_turn_of_a_session_saves_its_tail(bench: StartBench) -> None:
    here = bench()
    request = make_request("r", PROMPT[: BLOCK + 2], 99)
    assert len(here.run(request, 0, BLOCK + 2, [7, 8]).saves) == 2
    request.num_prompt_tokens += 1  # as `_update_request_as_session`
    request.append_output_token_ids([1])
    assert len(here.go_on(request, BLOCK + 2, []).saves) == 1
    assert here.half.finished(request) == announcement(BLOCK + 2, 1)


def test_consumer_saves_nothing_when_a_request_ends(bench: StartBench) -> None:
    here = bench(chunk_blocks=4, saves=False)
    request = make_request("r", PROMPT, 9)
    here.run(request, 0, 2 * BLOCK, [1, 2, 3, 4])
    assert leave(here, request) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("new_block_ids_to_zero", [2]),
        ("kv_cache_block_copies", [SimpleNamespace(src_block_id=9, dst_block_id=2)]),
    ],
)
def test_blocks_overwritten_before_their_save_are_not_saved(
    bench: StartBench, field: str, value: list[Any]
) -> None:
    here = bench(chunk_blocks=4)
    gone, other = make_request("gone", PROMPT, 9), make_request("other", PROMPT[1:], 9)
    here.run(gone, 0, 2 * BLOCK, [1, 2])
    here.run(other, 0, 2 * BLOCK, [3, 9])
    here.half.finished(gone)
    here.half.finished(other)
    output = SchedulerOutput.make_empty()
    setattr(output, field, value)
    (left,) = here.half.orders(output).leaving
    assert left.block_ids == ((3, 9),)


def test_nothing_is_saved_from_a_reset_cache(bench: StartBench) -> None:
    """vLLM frees the cache's memory when it sleeps, so it holds no KV afterwards."""
    here = bench(chunk_blocks=4)
    gone, preempted = make_request("gone", PROMPT, 9), make_request("r", PROMPT[1:], 9)
    for request in (gone, preempted):
        here.run(request, 0, 2 * BLOCK, [1, 2, 3, 4])
    here.half.finished(gone)
    here.half.reset()
    output = SchedulerOutput.make_empty()
    output.preempted_req_ids = {"r"}
    assert here.half.orders(output).leaving == ()


@pytest.mark.parametrize("local_blocks", range(6))
def test_local_blocks_inside_a_chunk_are_not_loaded(bench: StartBench, local_blocks: int) -> None:
    here = bench(chunk_blocks=3)
    prompt = list(range(5 * BLOCK + 3))
    here.put(chunks_of(prompt, 3))
    request = make_request("r", prompt)
    num_tokens = here.ask(request, local_blocks * BLOCK)
    assert num_tokens == len(prompt) - 1 - local_blocks * BLOCK, "all other tokens are loaded"
    here.half.allocated(request, [[50, 51, 52, 53, 54, 55]], num_tokens)
    (order,) = here.half.orders(SchedulerOutput.make_empty()).loads
    blocks = [block for piece in order.pieces for block in piece.block_ids[0]]
    assert blocks == list(range(50 + local_blocks, 56))
    first = order.pieces[0]
    assert first.first_block == local_blocks % 3


@pytest.mark.parametrize(("num_tokens", "blocks"), [(9, [50, 51, 52]), (8, [50, 51]), (1, [50])])
def test_vllm_may_allocate_some_blocks_of_a_chunk(
    bench: StartBench, num_tokens: int, blocks: list[int]
) -> None:
    here = bench(chunk_blocks=4)
    here.put(chunks_of(list(range(16)), 4))
    request = make_request("r", range(16))
    assert here.ask(request) == 15
    here.half.allocated(request, [[50, 51, 52]], num_tokens)
    (order,) = here.half.orders(SchedulerOutput.make_empty()).loads
    assert [block for piece in order.pieces for block in piece.block_ids[0]] == blocks


def test_other_prompt_finds_the_partial_chunk_of_a_shared_prefix(bench: StartBench) -> None:
    here = bench(chunk_blocks=4)
    turn = list(range(6 * BLOCK + 1))
    here.put(chunks_of(turn, 4))
    assert here.ask(make_request("next", [*turn, *range(100, 160)])) == 6 * BLOCK
    assert here.ask(make_request("other", [*turn[: 5 * BLOCK], *range(100, 160)])) == 4 * BLOCK


def test_object_keys_are_computed_on_the_io_thread(
    bench: StartBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: set[str] = set()

    def noted(*args: Any) -> str:
        makers.add(threading.current_thread().name)
        return object_key(*args)

    monkeypatch.setattr(lookups, "object_key", noted)
    here = bench()
    here.engine.host.is_in_memory = False  # a host cache in memory is probed at once
    assert here.ask(make_request("r", PROMPT)) == 0
    assert makers == {"ecshare-io"}


def test_lookup_with_many_shards_probes_one_per_chunk(bench: StartBench) -> None:
    """With eight ranks and 32 keys a round trip, four chunks can be probed fully, five cannot."""
    parts = tuple(f"t{rank}of8" for rank in range(8))
    here = bench(parts=parts)
    prompt = list(range(5 * BLOCK))
    for number, chunk in enumerate(chunks_of(prompt)):
        here.put([chunk], parts[number])
    assert here.ask(make_request("five", prompt)) == len(prompt) - 1
    assert here.ask(make_request("four", prompt[: 4 * BLOCK])) == 0


# --- announcements: they come from the client ---


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"kvshare": {"num_tokens": 5}}, 5),
        ({"kvshare": {"num_tokens": len(PROMPT) - 1}}, len(PROMPT) - 1),
        ({"kvshare": {"num_tokens": len(PROMPT)}}, 0),
        ({"kvshare": {"num_tokens": 10**30}}, 0),
        ({"kvshare": {"num_tokens": 0}}, 0),
        ({"kvshare": {"num_tokens": -5}}, 0),
        ({"kvshare": {"num_tokens": True}}, 0),
        ({"kvshare": {"num_tokens": 5.0}}, 0),
        ({"kvshare": {"num_tokens": "5"}}, 0),
        ({"kvshare": {"num_tokens": None}}, 0),
        ({"kvshare": {}}, 0),
        ({"kvshare": {"num_tokens": 5, "more": 1}}, 0),
        ({"kvshare": {"num_tokens": 5}, "others": 1}, 5),
        ({"kvshare": {"streamed": True}}, len(PROMPT) - 1),
        ({"kvshare": {"streamed": True, "num_tokens": 5}}, 0),
        ({"kvshare": {"streamed": 1}}, 0),
        ({"kvshare": {"streamed": "true"}}, 0),
        ({"kvshare": {"streamed": False}}, 0),
        ({"kvshare": [5]}, 0),
        ({"kvshare": "5"}, 0),
        ({"other": {"num_tokens": 5}}, 0),
        ({"do_remote_prefill": True}, len(PROMPT) - 1),
        (
            {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": None, 7: 7},
            len(PROMPT) - 1,
        ),
        ({"do_remote_prefill": True, "remote_host": "10.0.0.1"}, 0),
        ({"do_remote_prefill": True, "remote_block_ids": []}, 0),
        ({"do_remote_prefill": True, "kvshare": {"num_tokens": 5}}, 5),
        ({"do_remote_prefill": True, "kvshare": {}}, 0),
        ({"do_remote_prefill": 1}, 0),
        ({"do_remote_prefill": False}, 0),
        ({"do_remote_decode": True}, 0),
        ({}, 0),
        ([], 0),
        ("kvshare", 0),
        (None, 0),
    ],
)
def test_odd_announcements_are_ignored(params: Any, expected: int) -> None:
    request = make_request("r", PROMPT)
    request.kv_transfer_params = params
    assert announced_tokens(request) == expected


@pytest.mark.parametrize("writer", [1, 2, 3])
@pytest.mark.parametrize("reader", [1, 2, 3])
def test_only_a_pipeline_of_as_many_stages_awaits_announced_chunks(
    writer: int, reader: int
) -> None:
    request = make_request("r", PROMPT)
    request.kv_transfer_params = announcement(5, 1, writer)
    assert announced_tokens(request, reader) == (5 if reader == writer else 0)


def announcing(prompt: list[int], num_tokens: int | None = None, name: str = "r") -> Request:
    """Make a request that announces `num_tokens`, or the whole prompt as streamed."""
    said = {"streamed": True} if num_tokens is None else {"num_tokens": num_tokens}
    return make_request(name, prompt, kv_transfer_params={"kvshare": said})


@pytest.mark.parametrize("num_tokens", [None, len(PROMPT) - 1])
@pytest.mark.parametrize("local_blocks", [0, 1, 2])
def test_announced_chunks_are_loaded_without_a_lookup(
    bench: StartBench, local_blocks: int, num_tokens: int | None
) -> None:
    here = bench()
    chunks = chunks_of(PROMPT)
    request = announcing(PROMPT, num_tokens)
    start = local_blocks * BLOCK
    answer = here.half.num_loadable_tokens(request, start)
    assert answer == len(PROMPT) - 1 - start
    here.half.allocated(request, [[50, 51, 52, 53]], answer)
    (order,) = here.half.orders(SchedulerOutput.make_empty()).loads
    assert order.is_announced
    assert [(piece.key, piece.block_ids) for piece in order.pieces] == [
        (chunk.key, ((50 + number,),)) for number, chunk in enumerate(chunks)
    ][local_blocks:]
    assert here.engine.in_flight == 0
    stats = here.half.take_stats()
    assert stats is not None
    assert stats.data["tokens/announced"] == answer
    assert "tokens/hit" not in stats.data


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (2 * BLOCK, 0),
        (3 * BLOCK, 3 * BLOCK),
        (5 * BLOCK, 3 * BLOCK),
        (6 * BLOCK - 1, 3 * BLOCK),
        (6 * BLOCK, 6 * BLOCK),
        (8 * BLOCK - 1, 6 * BLOCK),
        (8 * BLOCK, 8 * BLOCK),
        (8 * BLOCK + 1, 8 * BLOCK + 1),
    ],
)
def test_only_chunks_within_the_announced_tokens_are_loaded(
    bench: StartBench, num_tokens: int, expected: int
) -> None:
    """The prompt has two whole chunks, two more blocks, and a tail of one loadable token."""
    here = bench(chunk_blocks=3)
    request = announcing(list(range(8 * BLOCK + 2)), num_tokens)
    assert here.ask(request) == expected


@pytest.mark.parametrize("num_tokens", range(2, 6 * BLOCK))
def test_reader_loads_exactly_the_chunks_the_writer_saved(
    bench: StartBench, num_tokens: int
) -> None:
    """For every prompt length, and every local hit of the writer."""
    prompt = list(range(num_tokens))
    for number, local_blocks in enumerate(range(-(-num_tokens // BLOCK))):
        here = bench(chunk_blocks=3)
        request = make_request(f"p{number}", prompt)
        blocks = list(range(8))
        saves = here.run(request, local_blocks * BLOCK, num_tokens, blocks).saves
        handed_over = here.half.finished(request)
        reader = make_request("d", prompt, kv_transfer_params=handed_over)
        answer = here.ask(reader)
        if num_tokens <= BLOCK:
            assert answer == 0, "less than a block is not waited for"
            continue
        assert answer == num_tokens - 1
        here.half.allocated(reader, [blocks], answer)
        (order,) = here.half.orders(SchedulerOutput.make_empty()).loads
        assert [piece.key for piece in order.pieces] == [piece.key for piece in saves]


def test_engine_with_only_announced_loads_learns_other_tp_sizes(
    bench: StartBench, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lookups never miss, and a miss is what otherwise triggers the check for marks."""
    caplog.set_level(logging.INFO, "kvshare")
    here = bench(other_tp_sizes={2: ("t0of2", "t1of2")})
    here.half.learn_tp_sizes(20.0)
    here.put_keys(tp_size_key(Kind.KV, NAMESPACE, 2))
    here.clock.now_s += 60
    assert "size 2 is used" not in caplog.text
    here.ask(announcing(PROMPT))
    here.engine.drain(20.0)
    assert "size 2 is used" in caplog.text


def test_announced_remainder_below_a_block_is_looked_up(bench: StartBench) -> None:
    here = bench()
    assert here.ask(announcing(PROMPT), 3 * BLOCK) == 0
    here.put(chunks_of(PROMPT))
    assert here.ask(announcing(PROMPT, name="again"), 3 * BLOCK) == 1


def test_preempted_announced_request_is_looked_up(bench: StartBench) -> None:
    here = bench()
    request = announcing(PROMPT)
    request.append_output_token_ids([1, 2, 3])
    assert here.half.num_loadable_tokens(request, 0) is None
    assert here.ask(request) == 0


def test_chunks_of_an_ended_announced_load_are_not_saved_again(bench: StartBench) -> None:
    here = bench()
    chunks = chunks_of(PROMPT)
    request = announcing(PROMPT)
    here.half.allocated(request, [[1, 2, 3, 4]], here.ask(request))
    end_load(here, chunks[2])
    orders = here.run(request, 2 * BLOCK, len(PROMPT), [1, 2, 3, 4])
    assert saved(orders) == [(chunks[2].key, 3), (chunks[3].key, 4)]
    assert here.half.num_loadable_tokens(request, 0) == 0, "not waited for again"


def test_announcement_does_not_suppress_saves_of_others(bench: StartBench) -> None:
    """A client may announce anything."""
    here = bench()
    request = announcing(PROMPT)
    here.half.allocated(request, [[1, 2, 3, 4]], here.ask(request))
    assert len(here.run(make_request("two", PROMPT), 0, len(PROMPT), [5, 6, 7, 8]).saves) == 4


@pytest.mark.parametrize(
    ("lost", "expected"),
    [(0, 0), (1, 2 * BLOCK), (2, 4 * BLOCK), (None, 5 * BLOCK + 2)],
)
def test_dropped_chunk_shortens_the_announcement(
    bench: StartBench, lost: int | None, expected: int
) -> None:
    """`lost` None: the dropped chunk is another prompt's."""
    here = bench(chunk_blocks=2)
    prompt = list(range(5 * BLOCK + 3))
    keys = [chunk.key for chunk in chunks_of(prompt, 2)]
    request = make_request("r", prompt)
    here.run(request, 0, len(prompt), list(range(6)))
    key = keys[lost] if lost is not None else chunks_of(prompt[1:], 2)[0].key
    report = Report(frozenset({key}), not_saved=frozenset({key}))
    here.half.reported(KVConnectorOutput(kv_connector_worker_meta=report))
    request.append_output_token_ids([1, 2, 3, 4])
    assert here.half.finished(request) == (announcement(expected, 1) if expected else None)


def test_late_loss_report_does_not_stop_running_saves(bench: StartBench) -> None:
    """A load ends at its first lost chunk. The loss of later ones may be reported when the engine
    has computed them and saves them."""
    here = bench()
    request = make_request("r", PROMPT)
    assert len(here.run(request, 0, len(PROMPT), [1, 2, 3, 4]).saves) == 4
    first, second, *_ = (chunk.key for chunk in chunks_of(PROMPT))
    report = Report(frozenset({first, second}), ended={first: 1})
    here.half.reported(KVConnectorOutput(kv_connector_worker_meta=report))
    assert here.run(make_request("two", PROMPT), 0, len(PROMPT), [5, 6, 7, 8]).saves == ()
    assert here.half.finished(request) == announcement(len(PROMPT) - 1, 1)


def pooling_request(name: str, tokens: list[int]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=None,
        pooling_params=PoolingParams(task="embed"),
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def long_request(name: str, tokens: list[int], **params: Any) -> Request:
    return make_request(name, tokens, 2, kv_transfer_params=params)


@pytest.mark.parametrize(
    ("make", "only_saves", "num_notes"),
    [
        (make_request, False, 0),
        (make_request, True, 1),
        (pooling_request, True, 0),
        (long_request, True, 0),
        (partial(long_request, do_remote_decode=True), False, 1),
        (partial(long_request, kvshare={"for_decode": True}), False, 1),
    ],
)
def test_gap_marker_is_written_if_another_engine_may_wait(
    bench: StartBench,
    make: Callable[[str, list[int]], Request],
    only_saves: bool,
    num_notes: int,
) -> None:
    """No engine waits for a pooling request, although it too is limited to one token."""
    here = bench(loads=not only_saves)
    request = make("r", PROMPT)
    here.ask(request)
    assert here.half.finished(request) is None
    here.engine.drain(20.0)
    notes = [path for path in GatedFileSystem.store if path.endswith(".gap")]
    assert len(notes) == num_notes


def test_request_with_blocks_behind_a_window_can_finish(bench: StartBench) -> None:
    """Its first blocks are local, unknown to the store, and cannot be saved any more."""
    window = LayerSet(0, (0,), (("layers.0", 0),), AttentionWindow(sliding_tokens=BLOCK), 1, 1)
    here = bench(layer_sets=(window,))
    request = make_request("r", PROMPT)
    here.run(request, 2 * BLOCK, len(PROMPT), [1, 2, 3, 4])
    request.append_output_token_ids([1])
    here.half.finished(request)


@pytest.mark.parametrize("is_loading", [False, True])
def test_load_of_a_finished_request_is_abandoned(bench: StartBench, is_loading: bool) -> None:
    here = bench()
    request = announcing(PROMPT)
    here.half.allocated(request, [[1, 2, 3, 4]], here.ask(request))
    if not is_loading:
        end_load(here)
    here.half.finished(request)
    assert here.half.orders(SchedulerOutput.make_empty()).abandoned == (("r",) * is_loading)
    assert here.half.orders(SchedulerOutput.make_empty()).abandoned == (), "once"
    end_load(here)
    stats = here.half.take_stats()
    assert stats is not None
    assert stats.data.get("tokens/loaded", 0) == (0 if is_loading else len(PROMPT) - 1)


# --- saves ---


def saved(orders: Orders) -> list[tuple[bytes, int]]:
    """Return the saves of `orders`, each of one block."""
    return [(piece.key, block) for piece in orders.saves for block in piece.block_ids[0]]


def test_blocks_are_saved_when_full_and_the_tail_with_the_prompt(
    bench: StartBench,
) -> None:
    here = bench()
    chunks = chunks_of(PROMPT)
    request = make_request("r", PROMPT, 9)
    assert saved(here.run(request, 0, BLOCK + 1, [7, 8])) == [(chunks[0].key, 7)]
    assert saved(here.go_on(request, BLOCK + 1, [9])) == []
    assert saved(here.go_on(request, 2 * BLOCK - 1, [])) == [(chunks[1].key, 8)]
    assert saved(here.go_on(request, 3 * BLOCK - 1, [])) == [(chunks[2].key, 9)]
    assert saved(here.go_on(request, 3 * BLOCK, [5])) == []
    assert saved(here.go_on(request, 3 * BLOCK + 1, [])) == [(chunks[3].key, 5)]
    assert saved(here.go_on(request, 3 * BLOCK + 2, [])) == []


def test_answer_blocks_are_saved_when_their_tokens_are_known(bench: StartBench) -> None:
    here = bench()
    request = make_request("r", PROMPT[:BLOCK], 9)
    here.run(request, 0, BLOCK, [7])
    request.append_output_token_ids([1, 2, 3])
    # Asynchronous scheduling: the fourth token is computed in this step, but not known yet.
    assert saved(here.go_on(request, 2 * BLOCK - 1, [8])) == []
    request.append_output_token_ids([4])
    assert saved(here.go_on(request, 2 * BLOCK, [9])) == [(request.block_hashes[1], 8)]


def test_resumed_request_is_saved_from_its_new_blocks(bench: StartBench) -> None:
    here = bench()
    request = make_request("r", PROMPT[:BLOCK], 9)
    here.run(request, 0, 2, [7])
    assert saved(here.go_on(request, BLOCK - 1, [30], resumed={"r"})) == [
        (request.block_hashes[0], 30)
    ]


def test_stored_chunks_are_not_saved_again(bench: StartBench) -> None:
    here = bench()
    chunks = chunks_of(PROMPT)
    here.put(chunks[:2])
    request = make_request("r", PROMPT)
    here.ask(request)
    orders = here.run(request, 0, len(PROMPT), [1, 2, 3, 4])
    assert saved(orders) == [(chunks[2].key, 3), (chunks[3].key, 4)]
    assert saved(here.run(make_request("two", PROMPT), 0, len(PROMPT), [5, 6, 7, 8])) == []


def test_lost_chunk_is_saved_again_from_the_local_cache(bench: StartBench) -> None:
    here = bench()
    chunks = chunks_of(PROMPT)
    here.run(make_request("one", PROMPT), 0, len(PROMPT), [1, 2, 3, 4])
    lost = frozenset({chunks[1].key})
    report = Report(lost, not_saved=lost)
    here.half.reported(KVConnectorOutput(kv_connector_worker_meta=report))
    # All but one token came from the local cache.
    orders = here.run(make_request("two", PROMPT), len(PROMPT) - 1, len(PROMPT), [1, 2, 3, 4])
    assert saved(orders) == [(chunks[1].key, 2)]


def test_stored_chunks_are_saved_again_after_ten_minutes(bench: StartBench) -> None:
    here = bench()
    assert len(here.run(make_request("one", PROMPT), 0, len(PROMPT), [1, 2, 3, 4]).saves) == 4
    here.clock.now_s += 599.0
    assert here.run(make_request("two", PROMPT), 0, len(PROMPT), [1, 2, 3, 4]).saves == ()
    here.clock.now_s += 2.0
    assert len(here.run(make_request("three", PROMPT), 0, len(PROMPT), [1, 2, 3, 4]).saves) == 4


def test_number_of_remembered_stored_chunks_is_bounded(
    bench: StartBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CHUNKS", 2)
    here = bench()
    chunks = chunks_of(PROMPT)
    here.run(make_request("one", PROMPT), 0, len(PROMPT), [1, 2, 3, 4])
    again = here.run(make_request("two", PROMPT[: 2 * BLOCK]), 0, 2 * BLOCK, [1, 2])
    assert saved(again) == [(chunks[0].key, 1), (chunks[1].key, 2)]


def test_idle_worker_report_ends_lookups_saves_and_announcements(bench: StartBench) -> None:
    here = bench()
    report = Report(frozenset(), is_idle=True)
    here.half.reported(KVConnectorOutput(kv_connector_worker_meta=report))
    request = make_request("r", PROMPT)
    assert here.half.num_loadable_tokens(request, 0) == 0
    assert here.run(request, 0, len(PROMPT), [1, 2, 3, 4]).saves == ()
    here.half.finished(request)


# --- KV with another layout ---


def test_lookups_pause_for_60_s_after_layout_mismatches(
    bench: StartBench, caplog: pytest.LogCaptureFixture
) -> None:
    here = bench()
    here.put(chunks_of(PROMPT))
    misfits = Report(frozenset(), has_misfits=True)

    def found() -> int:
        request = make_request("r", PROMPT)
        num_tokens = here.ask(request)
        assert here.ask(request) == num_tokens
        here.half.finished(request)
        return num_tokens

    for _ in range(8):
        assert found() == len(PROMPT) - 1
        here.half.reported(KVConnectorOutput(kv_connector_worker_meta=misfits))
    before = here.half.take_stats()
    assert before is not None
    assert "misses/layout" not in before.data
    assert found() == 0
    stats = here.half.take_stats()
    assert stats is not None
    assert stats.data["misses/layout"] == len(PROMPT) // BLOCK
    here.clock.now_s += 60
    assert found() == len(PROMPT) - 1, "it is tried again"
    here.half.reported(KVConnectorOutput(kv_connector_worker_meta=misfits))
    assert found() == 0
    said = [each for each in caplog.messages if "looks for KV once in 60 s" in each]
    assert len(said) == 1


def test_successful_load_resets_the_layout_mismatch_count(bench: StartBench) -> None:
    here = bench()
    chunks = chunks_of(PROMPT)
    here.put(chunks)
    misfits = Report(frozenset(), has_misfits=True)
    request = make_request("r", PROMPT)
    assert here.ask(request) == len(PROMPT) - 1
    here.half.allocated(request, [[1, 2, 3, 4]], len(PROMPT) - 1)
    for _ in range(7):
        here.half.reported(KVConnectorOutput(kv_connector_worker_meta=misfits))
    here.half.reported(KVConnectorOutput(finished_recving={"r"}))
    here.half.reported(KVConnectorOutput(kv_connector_worker_meta=misfits))
    assert here.ask(make_request("other", PROMPT)) == len(PROMPT) - 1


# --- what a step costs ---


def num_calls(work: Callable[[], object]) -> int:
    """Return how many Python and C functions `work` calls."""
    num = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num


# Thousands of requests decode at a time; neither prompt length nor past saves may cost.
MOST_CALLS = 4


def decode_calls(here: Bench, requests: Sequence[Request]) -> int:
    """Return how many functions the scheduler half calls in a step that decodes `requests`."""
    output, cached = SchedulerOutput.make_empty(), CachedRequestData.make_empty()
    for request in requests:
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(None)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        output.num_scheduled_tokens[request.request_id] = 1
    output.scheduled_cached_reqs = cached
    output.total_num_scheduled_tokens = len(requests)
    return num_calls(lambda: here.half.orders(output))


def decode_calls_per_request(here: Bench, requests: Sequence[Request]) -> float:
    decode_calls(here, requests)  # flushes what the last steps left
    half = len(requests) // 2
    return (decode_calls(here, requests) - decode_calls(here, requests[:half])) / half


@pytest.mark.parametrize("prompt_blocks", [2, 200])
def test_decode_step_costs_at_most_four_calls_per_request(
    bench: StartBench, prompt_blocks: int
) -> None:
    here = bench(chunk_blocks=16)
    prompt = list(range(prompt_blocks * BLOCK + 1))
    requests = [make_request(str(number), [number, *prompt[1:]], 9) for number in range(40)]
    for request in requests:
        here.run(request, 0, len(prompt), list(range(prompt_blocks + 1)))
    assert decode_calls_per_request(here, requests) <= MOST_CALLS


def test_requests_that_wait_for_memory_cost_at_most_six_calls_each(bench: StartBench) -> None:
    """As when the store is slower than the engine: then most do."""
    here = bench(options={"buffer_bytes": 4 * SLAB})
    requests = [make_request(str(number), [number, *PROMPT[1:]], 9) for number in range(40)]
    saved = [here.run(each, 0, len(PROMPT), [1, 2, 3, 4]).saves for each in requests]
    assert saved[0]
    assert not any(saved[1:])
    assert decode_calls_per_request(here, requests) <= MOST_CALLS + 2


# --- notes of use ---


def test_whole_prompt_counts_as_used_when_its_request_ends(bench: StartBench) -> None:
    """Also the chunks that are in vLLM's own cache, so that none outlives those before it."""
    here = bench(chunk_blocks=2, saves=False)
    request = make_request("r", list(range(5 * BLOCK + 3)), 99)
    here.run(request, 4 * BLOCK, 5 * BLOCK + 3, [7, 8, 9, 5, 6, 4])
    request.append_output_token_ids(list(range(2 * BLOCK)))
    here.go_on(request, 7 * BLOCK, [])
    here.half.finished(request)
    hashes, tail = request.block_hashes, chunks_of(list(range(5 * BLOCK + 3)), 2)[-1]
    assert taken(here.engine.uses) == [
        (hashes[1], 0, 2),
        (hashes[3], 0, 4),
        (hashes[5], 0, 6),
        (tail.key, 0, 6),
        (hashes[6], 0, 7),
    ]


def test_end_of_a_prompt_without_tail_counts_as_used(bench: StartBench) -> None:
    here = bench(chunk_blocks=2, saves=False)
    request = make_request("r", list(range(3 * BLOCK)), 99)
    here.run(request, 0, 3 * BLOCK, [7, 8, 9])
    here.half.finished(request)
    hashes = request.block_hashes
    assert taken(here.engine.uses) == [(hashes[1], 0, 2), (hashes[2], 0, 3)]


def test_found_tail_counts_as_used(bench: StartBench) -> None:
    here = bench()
    chunks = chunks_of(PROMPT)
    here.put(chunks)
    request = make_request("r", PROMPT)
    here.half.allocated(request, [[50, 51, 52, 53]], here.ask(request))
    used = {name: position for name, _, position in taken(here.engine.uses)}
    assert used[chunks[-1].key] == len(chunks)


def test_request_that_computed_nothing_records_no_use(bench: StartBench) -> None:
    here = bench()
    request = make_request("r", PROMPT)
    here.ask(request)
    here.half.finished(request)
    assert taken(here.engine.uses) == []
