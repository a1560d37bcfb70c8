# SPDX-License-Identifier: Apache-2.0
"""KV events in vLLM's own scheduler and publisher, and where hits come from."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash, maybe_convert_block_hash

from kvshare.chunks.prefix import Grid, Prefix
from kvshare.scheduler import events as module
from kvshare.scheduler.events import BlockEvents
from tests.kv_events import Followed, Subscriber
from tests.kvshare.conftest import StartEngine, is_at_rest, spin
from tests.kvshare.toy import BLOCK, ToyEngine, chunks_for, make_request, objects, serve
from tests.releases import needs_hit_sources

PROMPT = list(range(100, 100 + 5 * BLOCK + 3))
WITHOUT_TAIL = PROMPT[: 5 * BLOCK + 1]
NUM_FULL = 5

Publishing = Callable[..., ToyEngine]


@pytest.fixture(autouse=True, scope="module")
def _none_hash() -> None:
    init_none_hash(sha256)


@pytest.fixture
def subscriber(tmp_path: Path) -> Subscriber:
    return Subscriber(tmp_path)


@pytest.fixture
def publishing(start: StartEngine, subscriber: Subscriber) -> Publishing:
    def start_publishing(chunk_blocks: int = 1) -> ToyEngine:
        return start(
            store={"chunk_tokens": chunk_blocks * BLOCK},
            kv_events_config=KVEventsConfig(**subscriber.config),
        )

    return start_publishing


def hashes(prompt: list[int]) -> list[Any]:
    return [maybe_convert_block_hash(each) for each in make_request("x", prompt).block_hashes]


def step_to_report(engine: ToyEngine) -> None:
    """Run one more step, which reports the saves that ended in the last one."""
    serve(engine, [1], max_tokens=1, name="last")


@pytest.mark.parametrize("chunk_blocks", [1, 2, 64])
def test_stored_blocks_are_published_like_vllms_own_events(
    publishing: Publishing, subscriber: Subscriber, chunk_blocks: int
) -> None:
    engine = publishing(chunk_blocks)
    serve(engine, WITHOUT_TAIL, max_tokens=1)
    step_to_report(engine)
    full = hashes(WITHOUT_TAIL)
    followed = subscriber.wait(lambda now: len(now.stored) == NUM_FULL)
    assert followed.stored == followed.computed == set(full), "vLLM's own hashes"
    parent: Any = None
    for event in sorted(followed.of_store, key=lambda event: event.token_ids):
        assert isinstance(event, BlockStored)
        assert event.parent_block_hash == parent
        named: list[Any] = event.block_hashes
        first, count = full.index(named[0]), len(named)
        assert named == full[first : first + count]
        assert event.token_ids == WITHOUT_TAIL[first * BLOCK : (first + count) * BLOCK]
        assert (event.block_size, event.group_idx) == (BLOCK, 0)
        assert (event.locality, event.ownership) == (None, "kvshare")
        parent = named[-1]


def test_block_in_two_chunks_is_removed_only_with_the_last_chunk(
    publishing: Publishing, subscriber: Subscriber, tmp_path: Path
) -> None:
    """Three blocks are stored as a partial chunk; a prompt of five blocks stores longer ones."""
    engine = publishing(chunk_blocks=4)
    serve(engine, PROMPT[: 3 * BLOCK], max_tokens=1, name="short")
    serve(engine, WITHOUT_TAIL, max_tokens=1, name="long")
    step_to_report(engine)
    subscriber.wait(lambda now: len(now.stored) == NUM_FULL)
    for path in objects(tmp_path):
        path.unlink()
    shutil.rmtree(tmp_path / "host")
    engine.scheduler.reset_prefix_cache()
    serve(engine, PROMPT[: 3 * BLOCK], max_tokens=1, name="short again")
    spin(engine, lambda: is_at_rest(engine), "it has not come to rest")
    step_to_report(engine)
    serve(engine, WITHOUT_TAIL, max_tokens=1, name="long again")
    step_to_report(engine)
    # When the short prompt's chunk was found lost, the first three blocks were still in the long
    # prompt's chunk; when that was found lost, the short one's had been saved again.
    subscriber.wait(
        lambda now: len(now.stored) == NUM_FULL and withdrawn(now) == set(hashes(WITHOUT_TAIL)[3:])
    )


def withdrawn(followed: Followed) -> set[Any]:
    lost = [event for event in followed.of_store if not isinstance(event, BlockStored)]
    return {each for event in lost for each in event.block_hashes}


def test_blocks_that_a_load_finds_lost_are_removed(
    publishing: Publishing, subscriber: Subscriber, tmp_path: Path
) -> None:
    engine = publishing()
    serve(engine, PROMPT, max_tokens=1)
    step_to_report(engine)
    subscriber.wait(lambda now: len(now.stored) == NUM_FULL)
    shutil.rmtree(tmp_path / "host")
    engine.scheduler.reset_prefix_cache()

    def lose() -> None:
        for path in objects(tmp_path):
            path.unlink(missing_ok=True)

    engine.before_load = lose
    serve(engine, PROMPT, max_tokens=1, name="again")
    step_to_report(engine)
    subscriber.wait(lambda now: len(now.stored) == NUM_FULL and hashes(PROMPT)[0] in withdrawn(now))


def test_no_events_are_recorded_when_they_are_disabled(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[BlockEvents] = []
    monkeypatch.setattr(BlockEvents, "__init__", lambda self, *_, **__: made.append(self))
    engine = start()
    serve(engine, PROMPT, max_tokens=1)
    step_to_report(engine)
    assert engine.connector.take_events() == []
    assert not made, "it would record for no reader"


# --- the bookkeeping alone ---


def test_block_is_published_once_all_ranks_stored_their_shards() -> None:
    request = make_request("r", PROMPT)
    events, (chunk, other, *_) = (
        BlockEvents(Grid(BLOCK, 1), 2, group=0, is_remote=True),
        chunks_for(request),
    )
    events.ordered(request, chunk)
    events.stored({chunk.key: 1})
    assert events.take() == []
    events.stored({chunk.key: 1})
    (event,) = events.take()
    assert isinstance(event, BlockStored)
    assert event.locality == "REMOTE"
    events.ordered(request, other)
    events.stored({other.key: 1})
    events.lost([other.key])
    events.stored({other.key: 1})
    assert events.take() == [], "one rank could not store its shard"


@pytest.mark.parametrize("chunk_blocks", [1, 2, 64])
def test_blocks_of_a_tail_are_not_published(chunk_blocks: int) -> None:
    """No prompt with another end can load them."""
    request = make_request("r", PROMPT)
    events = BlockEvents(Grid(BLOCK, chunk_blocks), 1, group=0, is_remote=True)
    for chunk in chunks_for(request, chunk_blocks):
        events.ordered(request, chunk)
        events.stored({chunk.key: 1})
    published = [each for event in events.take() for each in event.block_hashes]  # type: ignore[attr-defined]
    assert published == hashes(PROMPT)[: NUM_FULL // chunk_blocks * chunk_blocks]


def test_block_saved_again_after_a_loss_is_published_again() -> None:
    request = make_request("r", PROMPT)
    events, chunk = BlockEvents(Grid(BLOCK, 1), 1, group=0, is_remote=True), chunks_for(request)[0]
    for is_again in (False, True):
        events.ordered(request, chunk)
        if is_again:
            events.lost([chunk.key])
        events.stored({chunk.key: 1})
    stored, removed, again = events.take()
    assert stored == again
    assert not isinstance(removed, BlockStored)


def test_number_of_remembered_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ORDERED", 3)
    monkeypatch.setattr(module, "MAX_ANNOUNCED", 3)
    events = BlockEvents(Grid(BLOCK, 1), 1, group=0, is_remote=True)
    request = make_request("long", list(range(20 * BLOCK)))
    chunks = [Prefix.of(request, Grid(BLOCK, 1)).whole(number) for number in range(20)]
    for chunk in chunks:
        events.ordered(request, chunk)
    events.stored({chunk.key: 1 for chunk in chunks})
    assert len(events.take()) == 3, "the oldest orders are dropped"
    for chunk in chunks:
        events.ordered(request, chunk)
        events.stored({chunk.key: 1})
    events.take()
    events.lost(chunk.key for chunk in chunks)
    assert len(events.take()) == 3, "the oldest announcements are dropped"
    events.stored({chunk.key: 1 for chunk in chunks})
    assert events.take() == [], "no new save was ordered"
    for chunk in chunks:
        events.ordered(request, chunk)
        events.stored({chunk.key: 1})
    assert len(events.take()) == 20, "none of their blocks counts as stored in another chunk"


# --- where hits come from ---


@needs_hit_sources
def test_hit_sources_separate_host_cache_and_store(start: StartEngine, tmp_path: Path) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    serve(start(store={"host_cache_dir": f"{tmp_path}/other"}), PROMPT, max_tokens=1)
    serve(start("kv_consumer"), PROMPT[: 2 * BLOCK + 1], max_tokens=1)
    engine = start("kv_consumer")
    serve(engine, PROMPT, max_tokens=1)
    at_host = 2 * BLOCK
    assert engine.hit_sources == {
        CacheHitSource.HOST: at_host,
        CacheHitSource.DISK: len(PROMPT) - 1 - at_host,
    }


@needs_hit_sources
def test_chunk_found_without_a_lookup_has_an_unspecified_source(start: StartEngine) -> None:
    prompt = list(range(60 * BLOCK + 1))
    serve(start(num_blocks=80), prompt, max_tokens=1)
    engine = start("kv_consumer", num_blocks=80)
    serve(engine, prompt, max_tokens=1)
    sources = {source.value: count for source, count in engine.hit_sources.items()}
    assert set(sources) == {"host", "external_unspecified"}
    assert sum(sources.values()) == len(prompt) - 1
