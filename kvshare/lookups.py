# SPDX-License-Identifier: Apache-2.0
"""Asks how much of a request is stored, while vLLM's scheduler goes on.

What was announced is not asked for: the chunks are named, and the load waits for them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from vllm.v1.request import Request

from ecshare.store.keys import Kind, object_key
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Done, Inquiry, Outcome, Questions, Tier
from ecshare.transfer.stats import Stats
from kvshare.adapters import Adapters
from kvshare.config import KVConfig
from kvshare.layers import LayerSet
from kvshare.messages import announced_tokens
from kvshare.prefix import Chunk, ChunkKey, Grid, HashFunction, Prefix, covered_tokens
from kvshare.search import KEYS_A_ROUND, Found, longest_stored
from kvshare.trusted import TrustedKeys

UNSPECIFIED_SOURCE = "external_unspecified"
"""vLLM's word for hits from a remote store, or from who knows where."""


@dataclass(frozen=True, slots=True)
class KVFacts:
    """What the scheduler half must know of its engine."""

    namespace: str
    grid: Grid
    layer_sets: tuple[LayerSet, ...]
    parts: tuple[str, ...]
    """The names of the shares in which a chunk is stored; it is there if all of them are."""
    hash_function: HashFunction
    """vLLM's own, which made the block hashes."""
    saves: bool
    loads: bool
    store_source: str = UNSPECIFIED_SOURCE
    """What vLLM calls hits in a store like this one."""


@dataclass(slots=True)
class Search:
    """The question how much of a request can be loaded. Answered once `is_over`."""

    prefix: Prefix
    start_block: int
    begun_s: float
    deadline_s: float
    is_asking: bool = False
    is_over: bool = False
    found: tuple[Chunk, ...] = ()
    tiers: Mapping[ChunkKey, Tier] = field(default_factory=dict)
    """Where what was found is, as far as it was asked for."""
    is_announced: bool = False
    """Nobody looked for `found`: whoever computes it said so."""

    @property
    def start_tokens(self) -> int:
        """What lies before it was not asked for; the first chunk found may begin before it."""
        return self.start_block * self.prefix.grid.block_tokens

    @property
    def num_missing_blocks(self) -> int:
        """How many of the blocks that were asked for are not known to be stored."""
        found = sum(chunk.num_blocks for chunk in self.found)
        if self.found:
            found -= self.start_block - self.found[0].first_block
        return self.prefix.num_blocks - self.start_block - found


class Lookups:
    """Runs searches on the I/O thread; an answer is final after `wait_s`, whatever the store does.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(
        self,
        config: KVConfig,
        facts: KVFacts,
        engine: TransferEngine,
        stats: Stats,
        clock_s: Callable[[], float],
    ) -> None:
        """Use what the scheduler half owns. `clock_s`: monotonic seconds."""
        self._config = config
        self._facts = facts
        self._engine = engine
        self._stats = stats
        self._clock_s = clock_s
        self.stored = TrustedKeys(clock_s)
        """What need not be saved; who saves adds to it."""
        self.adapters = Adapters(engine, facts.grid, stats, wait_s=config.wait_s, clock_s=clock_s)
        # By what is asked for: requests with one prompt share one search.
        self._asking: dict[object, list[Search]] = {}

    def start(self, request: Request, grid: Grid, num_computed_tokens: int) -> Search:
        """Return a search for what `request` could load after `num_computed_tokens`."""
        prefix, now_s = Prefix.of(request, grid), self._clock_s()
        start_block = num_computed_tokens // grid.block_tokens
        announced = self._announced(request, prefix, num_computed_tokens)
        return Search(
            prefix,
            start_block,
            begun_s=now_s,
            deadline_s=now_s + self._config.wait_s,
            is_over=bool(announced) or start_block >= prefix.num_blocks,
            found=announced,
            is_announced=bool(announced),
        )

    def _announced(
        self, request: Request, prefix: Prefix, num_computed_tokens: int
    ) -> tuple[Chunk, ...]:
        """Return the chunks that were announced: they need not be looked for."""
        num_tokens = announced_tokens(request)
        # Less than a block is computed sooner than it comes. What a preempted request has
        # generated was not announced.
        is_little = num_tokens - num_computed_tokens < prefix.grid.block_tokens
        if is_little or request.num_tokens > request.num_prompt_tokens:
            return ()
        start_block = num_computed_tokens // prefix.grid.block_tokens
        chunks = prefix.chunks(start_block, self._facts.hash_function)
        return tuple(
            takewhile(lambda chunk: covered_tokens(request, [chunk]) <= num_tokens, chunks)
        )

    def advance(self, search: Search) -> None:
        """Ask, or take the answer, or give up."""
        self.poll()
        now_s = self._clock_s()
        if search.is_over:
            return
        if now_s >= search.deadline_s:
            self._end(search, "late")
        elif not search.is_asking:
            self._ask(search, min(self._config.io_timeout_s, search.deadline_s - now_s))

    def poll(self) -> None:
        """Take what has been answered."""
        for done in self._engine.poll():
            if isinstance(done.job, Inquiry):
                for search in self._asking.pop(done.job.questions, ()):
                    self._answer(search, done)
            else:
                self.adapters.take(done)

    def _ask(self, search: Search, timeout_s: float) -> None:
        search.is_asking = True
        asked = _Asked(self._facts, search.prefix, search.start_block)
        waiting = self._asking.setdefault(asked, [])
        waiting.append(search)
        if len(waiting) == 1:
            self._engine.submit(Inquiry(asked, timeout_s))

    def _answer(self, search: Search, done: Done) -> None:
        search.is_asking = False
        if done.outcome is not Outcome.OK or not isinstance(done.value, Found):
            self._end(search, done.outcome.value)
            return
        for chunk in done.value.chunks:
            self.stored.add(chunk.key)
        self.stored.lost(done.value.missing)
        if search.is_over:
            return
        search.found, search.tiers = done.value.chunks, done.value.tiers
        self._end(search, "missing")

    def _end(self, search: Search, reason: str) -> None:
        """Make the answer final; `reason`: why there are blocks that were not found, if any."""
        if search.is_over:
            return
        search.is_over = True
        self._stats.add("waits/look_up")
        self._stats.add("wait_seconds/look_up", self._clock_s() - search.begun_s)
        if search.num_missing_blocks:
            self._stats.add("blocks/missed", search.num_missing_blocks)
            self._stats.add(f"misses/{reason}", search.num_missing_blocks)


class _Asked:
    """Whether chunks are stored, as questions for their keys. Equal where all keys are.

    Called on the I/O thread: to make hundreds of keys takes longer than a hook should.
    """

    def __init__(self, facts: KVFacts, prefix: Prefix, start_block: int) -> None:
        self._facts = facts
        self._prefix = prefix
        self._start_block = start_block
        self._identity = prefix.identity, start_block

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __call__(self) -> Questions:
        rounds = longest_stored(self._prefix, self._start_block, self._facts.hash_function)
        answers: Any = None  # to send None is to begin
        tiers: dict[ChunkKey, Tier] = {}
        while True:
            try:
                chunks = rounds.send(answers)
            except StopIteration as end:
                return replace(end.value, tiers=tiers)
            keys = [self._keys(chunks, number) for number in range(len(chunks))]
            where = iter((yield [key for shares in keys for key in shares]))
            answers = []
            for chunk, shares in zip(chunks, keys, strict=True):
                found = [next(where) for _ in shares]
                answers.append(None not in found)
                if answers[-1]:
                    tiers[chunk.key] = Tier.STORE if Tier.STORE in found else Tier.HOST

    def _keys(self, chunks: Sequence[Chunk], number: int) -> list[str]:
        """Return the keys of chunk `number`: of all its shares if that is one round trip for all
        chunks, else of one, in turn. A chunk of which another is lost is then found by the load."""
        parts = self._facts.parts
        if len(chunks) * len(parts) > KEYS_A_ROUND:
            parts = (parts[number % len(parts)],)
        name = bytes(chunks[number].key)
        return [object_key(Kind.KV, self._facts.namespace, name, part) for part in parts]
