# SPDX-License-Identifier: Apache-2.0
"""Maps a request's tokens to the chunks that may contain their KV; pure.

A chunk is a run of consecutive blocks of a request that begins at a multiple of the chunk size:

    whole   all blocks up to the next multiple
    partial the full blocks that follow the last whole chunk, where a prompt or an answer ends
    tail    a prompt's last, partly filled block, wherever it lies; its very last token does not
            count, since the reader computes that one itself

Whole and partial chunks are named by vLLM's own chained hash of their last block. vLLM's hashes
cover the tokens, all tokens before them, the media, the name of the LoRA adapter and the
cache_salt; what the adapter contains is added (see `adapters`). So equal names mean equal KV, and
with the chunk size (a fact of the namespace) equal blocks in one chunk. The one input that they do
not cover is refused: see `is_mixed`. tests/kvshare/test_inputs.py judges each field of a request.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NewType

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.request import Request

from kvshare.config import Tails

ChunkKey = NewType("ChunkKey", bytes)
HashFunction = Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored unit: `num_blocks` blocks of a request, of which `num_tokens` tokens count."""

    key: ChunkKey
    first_block: int
    num_blocks: int
    start_tokens: int
    num_tokens: int

    @property
    def end_tokens(self) -> int:
        """The first token after it."""
        return self.start_tokens + self.num_tokens


@dataclass(frozen=True, slots=True)
class Grid:
    """How requests are divided into blocks and chunks, and how chunks are named."""

    block_tokens: int
    chunk_blocks: int
    adapter: bytes = b""
    """Fingerprint of the LoRA adapter that the request runs with: the end of each name."""
    tails: Tails = "always"
    """The option `tails`: for which prompts the tail is stored."""

    def has_tail(self, request: Request) -> bool:
        """Whether the tail of the prompt may be stored and loaded, if it has one."""
        return self.tails == "always" or (self.tails == "salted" and bool(request.cache_salt))

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a whole chunk."""
        return self.block_tokens * self.chunk_blocks

    def run(self, hashes: Sequence[bytes], first_block: int, end_block: int) -> Chunk:
        """Return the chunk of the full blocks from `first_block` to before `end_block`."""
        num_blocks = end_block - first_block
        return Chunk(
            ChunkKey(hashes[end_block - 1] + self.adapter),
            first_block,
            num_blocks,
            first_block * self.block_tokens,
            num_blocks * self.block_tokens,
        )


@dataclass(frozen=True, slots=True)
class Tail:
    """The data from which the name of a prompt's tail is made; see the module."""

    block: int
    block_before: bytes | None
    """The hash of the block before it."""
    tokens: tuple[int, ...]
    extra_keys: tuple[Any, ...] | None
    """What vLLM hashes besides tokens: media, LoRA adapter, cache_salt."""

    def chunk(self, grid: Grid, hash_function: HashFunction) -> Chunk:
        """Name it, as vLLM names a block, over fewer tokens: it can equal no block's name."""
        key = hash_block_tokens(
            hash_function,
            self.block_before,  # type: ignore[arg-type]  # a NewType of bytes
            self.tokens,
            self.extra_keys,
        )
        start_tokens = self.block * grid.block_tokens
        return Chunk(ChunkKey(key + grid.adapter), self.block, 1, start_tokens, len(self.tokens))


def is_mixed(request: Request) -> bool:
    """Whether the prompt has token ids and embeddings in turn. Its KV must not be shared: vLLM's
    hashes cover both, and not which of them counts at each position."""
    return request.prompt_is_token_ids is not None


def tail_of(request: Request, grid: Grid) -> Tail | None:
    """Return the tail of the prompt; None if full blocks hold all but its last token, or if its
    tail is not to be stored."""
    if not grid.has_tail(request):
        return None
    block, num_tokens = divmod(request.num_prompt_tokens - 1, grid.block_tokens)
    if not num_tokens or num_tokens == grid.block_tokens - 1 or block > len(request.block_hashes):
        return None
    start = block * grid.block_tokens
    extra_keys, _ = generate_block_hash_extra_keys(request, start, start + num_tokens, 0)
    return Tail(
        block,
        request.block_hashes[block - 1] if block else None,
        tuple(request.all_token_ids[start : start + num_tokens]),
        extra_keys,
    )


def stored_tokens(request: Request, grid: Grid) -> int:
    """Return up to which token of the prompt all is stored once it is computed."""
    full_tokens = request.num_prompt_tokens // grid.block_tokens * grid.block_tokens
    return min(
        request.num_prompt_tokens if grid.has_tail(request) else full_tokens,
        request.num_prompt_tokens - 1,
    )


@dataclass(frozen=True, slots=True)
class Prefix:
    """The chunks that may contain the KV of a request's tokens; each is named on demand.

    It is made in microseconds from immutable values, so other threads may read it.
    """

    grid: Grid
    hashes: tuple[bytes, ...]
    """Of all full blocks."""
    tail: Tail | None

    @classmethod
    def of(cls, request: Request, grid: Grid) -> "Prefix":
        """Return what `request` may load.

        One that was preempted has output tokens too; its full blocks are loadable, while the tail
        of its prompt is part of one of them and is left out.
        """
        is_prompt_alone = request.num_tokens == request.num_prompt_tokens
        tail = tail_of(request, grid) if is_prompt_alone else None
        return cls(grid, tuple(request.block_hashes), tail)

    @property
    def num_blocks(self) -> int:
        """Full blocks, and the tail's."""
        return len(self.hashes) + (self.tail is not None)

    @property
    def num_whole(self) -> int:
        """How many chunks are whole."""
        return len(self.hashes) // self.grid.chunk_blocks

    @property
    def identity(self) -> tuple[int, bytes, Tail | None, bytes]:
        """Equal for two requests if all their chunks are."""
        last_hash = self.hashes[-1] if self.hashes else b""
        return len(self.hashes), last_hash, self.tail, self.grid.adapter

    def whole(self, number: int) -> Chunk:
        """Return whole chunk `number`."""
        first_block = number * self.grid.chunk_blocks
        return self.grid.run(self.hashes, first_block, first_block + self.grid.chunk_blocks)

    def partials(self, number: int, start_block: int = 0) -> list[Chunk]:
        """Return the partial chunks that chunk `number` may have been stored as, the longest first.

        One for each place where somebody's prompt or answer may have ended, after `start_block`.
        """
        first_block = number * self.grid.chunk_blocks
        longest = min(first_block + self.grid.chunk_blocks - 1, len(self.hashes))
        return [
            self.grid.run(self.hashes, first_block, end_block)
            for end_block in range(longest, max(first_block, start_block), -1)
        ]

    def chunks(self, start_block: int, hash_function: HashFunction) -> Iterator[Chunk]:
        """Yield the chunks that an engine stores when it computes all of it, from `start_block` on.

        The first chunk may begin before `start_block`.
        """
        for number in range(start_block // self.grid.chunk_blocks, self.num_whole):
            yield self.whole(number)
        yield from self.partials(self.num_whole, start_block)[:1]
        if self.tail is not None:
            yield self.tail.chunk(self.grid, hash_function)


def last_chunk(prefix: Prefix, hash_function: HashFunction) -> Chunk:
    """Return the last chunk that an engine stores when it computes all of `prefix`."""
    if prefix.tail is not None:
        return prefix.tail.chunk(prefix.grid, hash_function)
    return (prefix.partials(prefix.num_whole) or [prefix.whole(prefix.num_whole - 1)])[0]


def covered_tokens(request: Request, chunks: Sequence[Chunk]) -> int:
    """Return up to which token `request` is covered once `chunks`, its latest ones, are loaded.

    The last token is never covered: the engine computes it to sample the next one.
    """
    return min(chunks[-1].end_tokens, request.num_tokens - 1) if chunks else 0


def prompt_chunks(request: Request, grid: Grid, hash_function: HashFunction) -> tuple[Chunk, ...]:
    """Return all chunks of a prompt, its tail included. O(chunks)."""
    hashes = tuple(request.block_hashes[: request.num_prompt_tokens // grid.block_tokens])
    prefix = Prefix(grid, hashes, tail_of(request, grid))
    return tuple(prefix.chunks(0, hash_function))
