# SPDX-License-Identifier: Apache-2.0
"""Finds the longest stored prefix of a request in few rounds of look-ups; pure.

A round is one round trip to the store, for many keys at once. The stored chunks of a prompt nearly
always have no gap, because an engine that stored a chunk has stored those before it. So whole
chunks are searched from coarse to fine: first some that are evenly spread, then those between the
last one that is stored and the first one that is missing. When no chunk is left between these, the
partial chunks that may be stored in place of the next chunk are looked up. If a chunk that was not
looked up is lost, the load detects it. If the prompt's tail is stored, it is taken in place of the
partial chunks.

For 32,768 tokens in chunks of 256 and blocks of 16, one round is enough if everything or nothing is
stored. Otherwise it takes at most three.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from ecshare.transfer.jobs import Tier
from kvshare.chunks.prefix import Chunk, ChunkKey, HashFunction, Prefix

# The number of keys that stores look up in parallel.
KEYS_A_ROUND = 32


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The stored leading chunks of a prefix, in order, and the keys that were found missing."""

    chunks: tuple[Chunk, ...]
    missing: tuple[ChunkKey, ...]
    tiers: Mapping[ChunkKey, Tier] = field(default_factory=dict)
    """The tier of each chunk that was looked up; the caller adds it."""
    tp_sizes: Mapping[ChunkKey, int] = field(default_factory=dict)
    """The tensor-parallel size in which each chunk is stored."""

    def __bool__(self) -> bool:
        """Return whether anything is stored."""
        return bool(self.chunks)

    def in_tp_sizes(self, tp_sizes: Mapping[ChunkKey, int]) -> "StoredPrefix":
        """Return this result, cut before the first chunk that has no size in `tp_sizes`."""
        chunks = tuple(takewhile(lambda chunk: chunk.key in tp_sizes, self.chunks))
        lost = (chunk.key for chunk in self.chunks if chunk.key not in tp_sizes)
        return replace(self, chunks=chunks, missing=(*self.missing, *lost), tp_sizes=tp_sizes)


def infer_tp_sizes(chunks: Sequence[Chunk], tp_sizes: dict[ChunkKey, int]) -> list[Chunk]:
    """Add sizes for `chunks` that were not looked up; return those whose size stays unknown.

    If all chunks that were looked up have one size, the others have it too. In a conversation,
    chunks of prompts and answers may come from engines of different sizes, in any order. Then the
    other chunks are returned.
    """
    unknown = [chunk for chunk in chunks if chunk.key not in tp_sizes]
    known = {tp_sizes[chunk.key] for chunk in chunks if chunk.key in tp_sizes}
    if len(known) > 1:
        return unknown
    tp_sizes.update((chunk.key, size) for size in known for chunk in unknown)
    return []


Rounds = Generator[list[Chunk], Sequence[bool], StoredPrefix]


def longest_stored(
    prefix: Prefix,
    start_block: int,
    hash_function: HashFunction,
    chunks_a_round: int = KEYS_A_ROUND,
) -> Rounds:
    """Yield chunks, receive whether each is stored, and return the result.

    `start_block`: blocks before it are not needed; the first chunk of the result may begin before
    it. `chunks_a_round`: less than KEYS_A_ROUND if each chunk needs several keys.
    """
    search = _PrefixSearch(prefix, start_block, hash_function, chunks_a_round)
    while chunks := search.next_round():
        search.record(chunks, (yield chunks))
    return search.result()


class _PrefixSearch:
    """One search. Whole chunks before `_low` are stored; `_high` is missing, or past the end."""

    def __init__(
        self, prefix: Prefix, start_block: int, hash_function: HashFunction, most: int
    ) -> None:
        self._prefix = prefix
        self._most = most
        self._start_block = start_block
        self._first = self._low = start_block // prefix.grid.chunk_blocks
        self._high = max(prefix.num_whole, self._low)
        self._is_stored: dict[ChunkKey, bool] = {}
        self._tail = prefix.tail.chunk(prefix.grid, hash_function) if prefix.tail else None

    def next_round(self) -> list[Chunk]:
        """Return the chunks to look up; empty: the search has ended."""
        wanted = {} if self._is_stored else {chunk.key: chunk for chunk in self._ends()}
        # With these, the search ends after one round if nothing is stored, as for most prompts.
        next_partials = self._open_partials(self._low)
        if len(next_partials) <= self._most // 2 or self._low == self._high:
            wanted |= {chunk.key: chunk for chunk in next_partials}
        room = max(1, self._most - len(wanted))
        for number in spread(self._low, self._high, room):
            chunk = self._prefix.whole(number)
            wanted[chunk.key] = chunk
        for number in (self._high, *range(self._low + 1, self._high)):
            partials = {chunk.key: chunk for chunk in self._open_partials(number)}
            if len(wanted | partials) > self._most:
                break
            wanted |= partials
        return list(wanted.values())

    def record(self, chunks: Sequence[Chunk], are_stored: Sequence[bool]) -> None:
        """Record which chunks of a round are stored, and narrow the search."""
        self._is_stored |= {
            chunk.key: is_stored for chunk, is_stored in zip(chunks, are_stored, strict=True)
        }
        for number in range(self._low, self._high):
            is_stored = self._is_stored.get(self._prefix.whole(number).key)
            if is_stored:
                self._low = number + 1
            elif is_stored is False:
                self._high = number
                break

    def result(self) -> StoredPrefix:
        """Return the longest stored prefix."""
        chunks = [self._prefix.whole(number) for number in range(self._first, self._low)]
        ends = self._prefix.partials(self._low, self._start_block)
        if self._tail is not None and self._low == self._prefix.num_whole:
            ends = [self._tail, *ends]
        chunks += [chunk for chunk in ends if self._is_stored.get(chunk.key)][:1]
        missing = [key for key, is_stored in self._is_stored.items() if not is_stored]
        return StoredPrefix(tuple(chunks), tuple(missing))

    def _ends(self) -> list[Chunk]:
        """Return the tail, and the partial chunk at the end of the full blocks."""
        partials = self._prefix.partials(self._prefix.num_whole, self._start_block)
        return [*([self._tail] if self._tail else []), *partials[:1]]

    def _open_partials(self, number: int) -> list[Chunk]:
        """Return the partial chunks of chunk `number` that were not looked up, and are longer than
        the longest one known to be stored."""
        unknown = []
        for chunk in self._prefix.partials(number, self._start_block):
            if self._is_stored.get(chunk.key):
                break
            if chunk.key not in self._is_stored:
                unknown.append(chunk)
        return unknown


def spread(low: int, high: int, most: int) -> list[int]:
    """Return at most `most` numbers from `low` to before `high`, evenly spread, ends included."""
    count = min(most, high - low)
    if count <= 1:
        return list(range(low, low + count))
    return [low + step * (high - low - 1) // (count - 1) for step in range(count)]
