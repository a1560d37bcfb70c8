# SPDX-License-Identifier: Apache-2.0
"""Looks up how much of a request is stored, while vLLM's scheduler goes on.

A prompt that is completely in this host's memory is found at once. All others are looked up on the
I/O thread, and vLLM asks again in a later step.

Announced chunks are not looked up: their names are known, and the load waits for them. But if
engines of several tensor-parallel sizes store KV, the size of each chunk must be found. Then
announced chunks are looked up until they are stored.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

from vllm.v1.request import Request

from ecshare.store.keys import Key, Kind, object_key
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Done, Handle, LookupRounds, MultiLookup, Tier
from kvshare.chunks.facts import KVFacts
from kvshare.chunks.prefix import Chunk, ChunkKey, Grid, Prefix, covered_tokens, last_chunk
from kvshare.chunks.recent_keys import RecentKeys
from kvshare.config import KVConfig
from kvshare.messages import announced_tokens, announced_tp_size, num_old_tokens
from kvshare.scheduler.search import (
    KEYS_A_ROUND,
    StoredPrefix,
    infer_tp_sizes,
    longest_stored,
    spread,
)
from kvshare.scheduler.tp_sizes import StoredTpSizes

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.05
# The fewest chunks per round, however many sizes are asked for.
_FEWEST_CHUNKS = 4
# A hook asks the host cache for at most this many keys of a prompt. If the prompt has more chunks
# than this, it takes too long to name them in a hook.
_HOST_CACHE_KEYS = 16
_MOST_HOST_CACHE_CHUNKS = 128

Answers = LookupRounds[dict[ChunkKey, int]]
"""Yields keys, receives where each of them is, and returns the size of each stored chunk."""


@dataclass(slots=True)
class PrefixLookup:
    """A look-up of how much of a request can be loaded. It is final when `is_over`."""

    prefix: Prefix
    start_block: int
    tp_sizes: tuple[int, ...]
    """The tensor-parallel sizes to look for."""
    awaited_tokens: int
    """The number of announced tokens, which are looked up until they are stored."""
    begun_s: float
    deadline_s: float
    next_ask_s: float
    pause_s: float = _FIRST_PAUSE_S
    is_asking: bool = False
    is_over: bool = False
    found: tuple[Chunk, ...] = ()
    tiers: Mapping[ChunkKey, Tier] = field(default_factory=dict)
    """Where the chunks of `found` are, as far as the look-up asked for them."""
    is_announced: bool = False
    """`found` was announced, and not looked up."""
    other_tp_sizes: Mapping[ChunkKey, int] = field(default_factory=dict)
    """The size of each chunk that is stored in another size than this engine's own."""
    is_weighed: bool = False
    """`found` was cut to what is worth loading."""
    is_answered: bool = False
    """vLLM was told the result. If it asks again, it could not admit the request."""

    @property
    def start_tokens(self) -> int:
        """The first token of the look-up; the first chunk found may begin before it."""
        return self.start_block * self.prefix.grid.block_tokens

    @property
    def num_missing_blocks(self) -> int:
        """The number of blocks of the look-up that are not known to be stored."""
        found = sum(chunk.num_blocks for chunk in self.found if not chunk.is_state)
        if self.found:
            found -= self.start_block - self.found[0].first_block
        return self.prefix.num_blocks - self.start_block - found


class Lookups:
    """Runs look-ups on the I/O thread. Each ends after at most `wait_s`, whatever the store does.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(
        self,
        config: KVConfig,
        facts: KVFacts,
        engine: TransferEngine,
        stored: RecentKeys[ChunkKey],
        clock_s: Callable[[], float],
    ) -> None:
        """Use what the scheduler half owns. `stored`: is updated with what look-ups find and miss.

        `clock_s`: monotonic seconds.
        """
        self._config = config
        self._facts = facts
        self._engine = engine
        self._stats = engine.stats
        self._clock_s = clock_s
        self._stored = stored
        self.tp_sizes = StoredTpSizes(
            facts.namespace, facts.tp_size, tuple(facts.shard_names), engine, clock_s
        )
        # Requests with the same prompt share one query.
        self._asking: dict[_Query, list[PrefixLookup]] = {}
        self._has_warned = False

    def in_namespace(self, facts: KVFacts) -> "Lookups":
        """Return the look-ups of the same engine in the namespace of `facts`. What those under way
        find in the old one is forgotten."""
        stored, self._stored = self._stored, RecentKeys(self._clock_s)
        return Lookups(self._config, facts, self._engine, stored, self._clock_s)

    def start(
        self, request: Request, grid: Grid, num_computed_tokens: int, fewest_tokens: int = 0
    ) -> PrefixLookup:
        """Return a look-up of the chunks that `request` can load after `num_computed_tokens`.

        If these are fewer than `fewest_tokens`, and less than a whole chunk, nothing is looked up.
        Nor is what follows a new media item, which no engine can have stored.
        """
        prefix, now_s = Prefix.of(request, grid), self._clock_s()
        start_block = num_computed_tokens // grid.block_tokens
        tp_sizes = self.tp_sizes.with_announced(announced_tp_size(request))
        announced = self._announced(request, prefix, num_computed_tokens)
        awaited_tokens = 0
        old_tokens = num_old_tokens(request)
        if old_tokens < request.num_tokens:
            old_hashes = prefix.hashes[: old_tokens // grid.block_tokens]
            prefix = replace(prefix, hashes=old_hashes, tail=None)
        asks_nothing = start_block >= prefix.num_blocks or (
            not announced
            and _is_little(request, grid, num_computed_tokens, fewest_tokens, old_tokens)
        )
        if announced:
            # Usually a miss checks for other sizes. There may be no look-up now that could miss.
            self.tp_sizes.look(self._config.io_timeout_s)
        if announced and len(tp_sizes) > 1:
            # The engine that announces may have loaded some of the chunks, of any size.
            awaited_tokens, announced = announced[-1].end_tokens, ()
        return PrefixLookup(
            prefix,
            start_block,
            tp_sizes,
            awaited_tokens,
            begun_s=now_s,
            deadline_s=now_s + self._config.wait_s,
            next_ask_s=now_s,
            is_over=bool(announced) or asks_nothing,
            found=announced,
            is_announced=bool(announced),
        )

    def _announced(
        self, request: Request, prefix: Prefix, num_computed_tokens: int
    ) -> tuple[Chunk, ...]:
        """Return the announced chunks, which need no look-up."""
        num_tokens = announced_tokens(request, self._facts.num_stages)
        if prefix.grid.has_states and announced_tp_size(request) not in (0, self._facts.tp_size):
            self._warn_of_other_states(announced_tp_size(request))
            return ()
        # Less than a block is computed sooner than it arrives. The tokens that a preempted request
        # has generated were not announced.
        is_little = num_tokens - num_computed_tokens < prefix.grid.block_tokens
        if is_little or request.num_tokens > request.num_prompt_tokens:
            return ()
        if num_tokens < request.num_prompt_tokens - 1:
            prefix = replace(prefix, tail=None)
        start_block = num_computed_tokens // prefix.grid.block_tokens
        chunks = prefix.chunks(start_block, self._facts.hash_function)
        announced = takewhile(lambda chunk: covered_tokens(request, [chunk]) <= num_tokens, chunks)
        return prefix.grid.with_state(tuple(announced))

    def _warn_of_other_states(self, tp_size: int) -> None:
        """Log once that states of engines with another tensor-parallel size cannot be loaded."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A prompt was announced by an engine of tensor-parallel size %d. States of "
                "recurrent layers are shared only between engines of the same size, and this one "
                "has %d: it computes such prompts.",
                tp_size,
                self._facts.tp_size,
            )

    def advance(self, lookup: PrefixLookup) -> None:
        """Continue the look-up: ask, take the result, or give up."""
        self._engine.poll()
        now_s = self._clock_s()
        if lookup.is_over:
            return
        if now_s >= lookup.deadline_s:
            self._end(lookup, "late")
        elif not lookup.is_asking and now_s >= lookup.next_ask_s:
            self._ask(lookup, min(self._config.io_timeout_s, lookup.deadline_s - now_s))

    def age_s(self, lookup: PrefixLookup) -> float:
        """Return the seconds since the start of the look-up."""
        return self._clock_s() - lookup.begun_s

    def has_waited(self, lookup: PrefixLookup) -> bool:
        """Return whether its request has waited for `wait_s`."""
        return self.age_s(lookup) > self._config.wait_s

    def _ask(self, lookup: PrefixLookup, timeout_s: float) -> None:
        found = self._found_in_host_cache(lookup)
        if found is not None:
            self._learn(lookup, found)
            return
        lookup.is_asking = True
        query = _Query(self._facts, lookup.prefix, lookup.start_block, lookup.tp_sizes)
        waiting = self._asking.setdefault(query, [])
        waiting.append(lookup)
        if len(waiting) == 1:
            job = MultiLookup(query, timeout_s)
            self._engine.submit(Handle(job, partial(self._answered, query)))

    def _found_in_host_cache(self, lookup: PrefixLookup) -> StoredPrefix | None:
        """Return all chunks of the look-up if a sample of them is in this host's memory.

        None if the store must be asked. Takes less than a millisecond.
        """
        prefix, start_block, tp_size = lookup.prefix, lookup.start_block, lookup.tp_sizes[0]
        first, hash_function = start_block // prefix.grid.chunk_blocks, self._facts.hash_function
        if prefix.num_whole - first > _MOST_HOST_CACHE_CHUNKS:
            return None
        # Ask for the last chunk first: most prompts end with new tokens.
        last = prefix.grid.with_state([last_chunk(prefix, hash_function)])
        if not self._are_in_host_cache(last, tp_size):
            return None
        chunks = prefix.grid.with_state(tuple(prefix.chunks(start_block, hash_function)))
        most = max(1, _HOST_CACHE_KEYS // len(self._facts.shard_names[tp_size]))
        asked = [chunks[number] for number in spread(0, len(chunks) - 1, most)]
        if not self._are_in_host_cache(asked, tp_size):
            return None
        tiers = {chunk.key: Tier.HOST for chunk in (*asked, chunks[-1])}
        return StoredPrefix(chunks, (), tiers, {chunk.key: tp_size for chunk in chunks})

    def _are_in_host_cache(self, chunks: Sequence[Chunk], tp_size: int) -> bool:
        keys = (key for chunk in chunks for key in _keys(self._facts, chunk, tp_size))
        return self._engine.has_in_memory(keys)

    def _answered(self, query: "_Query", done: Done[StoredPrefix]) -> None:
        first, *joined = self._asking.pop(query)
        self._answer(first, done)
        for lookup in joined:
            if done.is_late:
                lookup.is_asking = False  # it began later: it asks again in the time it has left
            else:
                self._answer(lookup, done)

    def _answer(self, lookup: PrefixLookup, done: Done[StoredPrefix]) -> None:
        lookup.is_asking = False
        if done.value is None:
            self._end(lookup, done.outcome.value)
            return
        self._learn(lookup, done.value)

    def _learn(self, lookup: PrefixLookup, found: StoredPrefix) -> None:
        for chunk in found.chunks:
            self._stored.add(chunk.key)
        self._stored.lost(found.missing)
        if lookup.is_over:
            return
        lookup.found, lookup.tiers = found.chunks, found.tiers
        own, tp_sizes = self._facts.tp_size, found.tp_sizes
        lookup.other_tp_sizes = {key: size for key, size in tp_sizes.items() if size != own}
        found_tokens = lookup.found[-1].end_tokens if lookup.found else 0
        if not lookup.num_missing_blocks or found_tokens >= lookup.awaited_tokens:
            self._end(lookup, "missing")
            return
        # The rest was announced and is still being stored: ask again.
        lookup.next_ask_s = self._clock_s() + lookup.pause_s
        lookup.pause_s = min(2 * lookup.pause_s, _LONGEST_PAUSE_S)

    def _end(self, lookup: PrefixLookup, reason: str) -> None:
        """Make the look-up final. `reason`: why blocks were not found, if any were not."""
        if lookup.is_over:
            return
        lookup.is_over = True
        self._stats.observe("wait_seconds/look_up", self.age_s(lookup))
        if lookup.num_missing_blocks:
            self.tp_sizes.look(self._config.io_timeout_s)
            self._stats.add("blocks/missed", lookup.num_missing_blocks)
            self._stats.add(f"misses/{reason}", lookup.num_missing_blocks)


def _is_little(
    request: Request, grid: Grid, num_computed_tokens: int, fewest_tokens: int, old_tokens: int
) -> bool:
    """Return whether the tokens left to load, before `old_tokens`, are too few for a look-up.

    False if they contain a media item: to compute them takes its embedding, and the request may
    have no pixels.
    """
    num_left = min(old_tokens, request.num_tokens - 1) - num_computed_tokens
    return num_left < min(fewest_tokens, grid.chunk_tokens) and all(
        feature.mm_position.offset + feature.mm_position.length <= num_computed_tokens
        or feature.mm_position.offset >= old_tokens
        for feature in request.mm_features
    )


class _Query:
    """The keys that a look-up asks for. Two queries are equal if all their keys are.

    Called on the I/O thread, because making hundreds of keys takes too long for a hook.
    """

    def __init__(
        self, facts: KVFacts, prefix: Prefix, start_block: int, tp_sizes: tuple[int, ...]
    ) -> None:
        self._facts = facts
        self._prefix = prefix
        self._start_block = start_block
        self._tp_sizes = tp_sizes
        self._identity = prefix.identity, start_block, tp_sizes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Query) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __call__(self) -> LookupRounds[StoredPrefix]:
        most = max(_FEWEST_CHUNKS, KEYS_A_ROUND // len(self._tp_sizes))
        rounds = longest_stored(self._prefix, self._start_block, self._facts.hash_function, most)
        tp_sizes: dict[ChunkKey, int] = {}
        answers: Any = None  # to send None is to begin
        tiers: dict[ChunkKey, Tier] = {}
        while True:
            try:
                chunks = rounds.send(answers)
            except StopIteration as end:
                found: StoredPrefix = end.value
                break
            needed = [each for chunk in chunks for each in self._needed_with(chunk)]
            tp_sizes |= yield from self._tp_sizes_of(needed, self._tp_sizes, tiers)
            answers = [
                all(each.key in tp_sizes for each in self._needed_with(chunk)) for chunk in chunks
            ]
        unclear = infer_tp_sizes(found.chunks, tp_sizes)
        if unclear:
            tp_sizes |= yield from self._tp_sizes_of(unclear, self._tp_sizes[:-1], tiers)
            for chunk in unclear:
                # It should be stored in some size, as its neighbours are. If not, the load fails.
                tp_sizes.setdefault(chunk.key, self._tp_sizes[-1])
        found = found.in_tp_sizes(tp_sizes)
        if self._prefix.grid.has_states:
            found = yield from self._up_to_last_state(found, tp_sizes, tiers)
        # A chunk that is of no use without its state may be stored.
        missing = tuple(key for key in found.missing if key not in tp_sizes)
        return replace(found, missing=missing, tiers=tiers)

    def _needed_with(self, chunk: Chunk) -> tuple[Chunk, ...]:
        """Return `chunk`, and all that must be stored besides for it to be of use.

        A partial chunk can only be the end of a hit, so it needs its state. A whole one may be
        followed by others.
        """
        grid = self._prefix.grid
        return grid.with_state([chunk]) if chunk.num_tokens < grid.chunk_tokens else (chunk,)

    def _up_to_last_state(
        self, found: StoredPrefix, tp_sizes: dict[ChunkKey, int], tiers: dict[ChunkKey, Tier]
    ) -> LookupRounds[StoredPrefix]:
        """Cut `found` after its last chunk with a stored state, and add that state.

        States are stored for few chunks: the last chunks are asked for first. Usually one of the
        first round is found. Further rounds ask for one object of each state, and for the others of
        one that is found.
        """
        state_of, num_objects = self._prefix.grid.state_of, len(self._facts.state_names)
        most = max(1, KEYS_A_ROUND // num_objects)
        missing: list[ChunkKey] = []
        chunks = list(found.chunks)
        while chunks:
            states = [state_of(chunk) for chunk in reversed(chunks[-most:])]
            if states[0].key not in tp_sizes:
                tp_sizes |= yield from self._tp_sizes_of(states, self._tp_sizes, tiers)
            is_sample, most = len(states) * num_objects > KEYS_A_ROUND, KEYS_A_ROUND
            for state in states:
                if is_sample and tp_sizes.pop(state.key, None) is not None:
                    tp_sizes |= yield from self._tp_sizes_of([state], self._tp_sizes, tiers)
                if state.key in tp_sizes:
                    found = replace(found, chunks=(*chunks, state), tp_sizes=tp_sizes)
                    return replace(found, missing=(*found.missing, *missing))
                missing.append(state.key)
                chunks.pop()
        return replace(found, chunks=(), missing=(*found.missing, *missing))

    def _tp_sizes_of(
        self, chunks: Sequence[Chunk], tp_sizes: tuple[int, ...], tiers: dict[ChunkKey, Tier]
    ) -> Answers:
        """Ask for `chunks`; return for each the first size in which its shards are stored.

        Add their tiers to `tiers`. If the keys of all shards fit into one round trip, ask for all.
        Otherwise ask for one shard of each chunk, not always the same one. If another shard is
        lost, the load notices it.
        """
        keys = [[_keys(self._facts, chunk, size) for size in tp_sizes] for chunk in chunks]
        if sum(len(shards) for by_size in keys for shards in by_size) > KEYS_A_ROUND:
            keys = [
                [[shards[number % len(shards)]] for shards in by_size]
                for number, by_size in enumerate(keys)
            ]
        where = iter((yield [key for by_size in keys for shards in by_size for key in shards]))
        found: dict[ChunkKey, int] = {}
        for chunk, by_size in zip(chunks, keys, strict=True):
            for size, shards in zip(tp_sizes, by_size, strict=True):
                places = [next(where) for _ in shards]
                if None not in places and chunk.key not in found:
                    found[chunk.key] = size
                    tiers[chunk.key] = Tier.STORE if Tier.STORE in places else Tier.HOST
        return found


def _keys(facts: KVFacts, chunk: Chunk, tp_size: int) -> list[Key]:
    """Return the keys of all objects of `chunk` that engines of `tp_size` store."""
    name, namespace = bytes(chunk.key), facts.namespace
    return [object_key(Kind.KV, namespace, name, part) for part in facts.names_of(chunk, tp_size)]
