# SPDX-License-Identifier: Apache-2.0
"""Maps a request's tokens to the chunks that may contain their KV; pure.

A chunk is a run of consecutive blocks of a request that begins at a multiple of the chunk size:

    whole   all blocks up to the next multiple
    partial the full blocks that follow the last whole chunk, where an answer ends, or a prompt
            without a tail
    tail    what follows the last whole chunk of a prompt, if its last block is partly filled; its
            very last token does not count, since the reader computes that one itself

If the model has recurrent layers, a prefix that is loaded must end with their state. So the state
after the last token of a chunk is stored too, for some chunks, and there are no tails.

Whole and partial chunks are named by vLLM's own chained hash of their last block. vLLM's hashes
cover the tokens, all tokens before them, the media, the name of the LoRA adapter and the
cache_salt; we append a fingerprint of the adapter's contents (see `adapters`). So equal names mean
equal KV, and since the chunk size is a fact of the namespace, equal blocks in the chunk. The hashes
do not cover one input, and requests with it are refused: see `is_mixed`. The verdict on each field
of a request is in tests/kvshare/test_inputs.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NewType

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.request import Request

from kvshare.config import Tails

ChunkKey = NewType("ChunkKey", bytes)
HashFunction = Callable[[Any], bytes]

# Appended to names. No other chunk has a name of such a length.
_STATE = b"state"
_TAIL = b"tail"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored unit: `num_blocks` blocks of a request, with `num_tokens` valid tokens."""

    key: ChunkKey
    first_block: int
    num_blocks: int
    start_tokens: int
    num_tokens: int
    is_state: bool = False
    """Whether it is a state of recurrent layers: that at the end of its one block."""

    @property
    def end_tokens(self) -> int:
        """The first token after the chunk."""
        return self.start_tokens + self.num_tokens


@dataclass(frozen=True, slots=True)
class Grid:
    """The parameters that divide requests into blocks and chunks, and that name chunks."""

    block_tokens: int
    chunk_blocks: int
    adapter: bytes = b""
    """Fingerprint of the request's LoRA adapter, appended to each name."""
    tails: Tails = "always"
    """The option `tails`: for which prompts the tail is stored."""
    has_states: bool = False
    """Whether a prefix that is loaded must end with the state of recurrent layers."""

    def has_tail(self, request: Request) -> bool:
        """Return whether `tails` allows the tail of the prompt, if any, to be stored and loaded."""
        if self.has_states:
            return False
        return self.tails == "always" or (self.tails == "salted" and bool(request.cache_salt))

    def num_in_tail(self, request: Request) -> int:
        """Return how many tokens of the prompt are in the last block of its tail; 0: it has none,
        because full blocks hold all tokens but the last, or because of `has_tail`."""
        num_tokens = (request.num_prompt_tokens - 1) % self.block_tokens
        is_allowed = num_tokens < self.block_tokens - 1 and self.has_tail(request)
        return num_tokens if is_allowed else 0

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a whole chunk."""
        return self.block_tokens * self.chunk_blocks

    def num_loadable_blocks(self, num_tokens: int) -> int:
        """Return how many full blocks a request of `num_tokens` can load.

        It computes its last token in any case. With recurrent layers that is done on top of the
        state before it, so a block that ends with the last token is of no use.
        """
        last = num_tokens - 1 if self.has_states else num_tokens
        return last // self.block_tokens

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

    def state_of(self, chunk: Chunk) -> Chunk:
        """Return the state of recurrent layers at the end of a whole or partial chunk."""
        first_block = chunk.first_block + chunk.num_blocks - 1
        return Chunk(
            ChunkKey(chunk.key + _STATE),
            first_block,
            1,
            first_block * self.block_tokens,
            self.block_tokens,
            is_state=True,
        )

    def with_state(self, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
        """Return `chunks`, the first ones of a request, with all that is needed to load them."""
        if not self.has_states or not chunks:
            return tuple(chunks)
        return (*chunks, self.state_of(chunks[-1]))


@dataclass(frozen=True, slots=True)
class Tail:
    """The data that name a prompt's tail; see the module docstring."""

    first_block: int
    num_blocks: int
    block_before: bytes | None
    """The hash of the block before its last one."""
    tokens: tuple[int, ...]
    """Those in its last block."""
    extra_keys: tuple[Any, ...] | None
    """The data that vLLM hashes besides tokens: media, LoRA adapter, cache_salt."""

    def chunk(self, grid: Grid, hash_function: HashFunction) -> Chunk:
        """Return the tail as a chunk.

        It is named as vLLM would name its last block, if that had only these tokens.
        """
        key = hash_block_tokens(
            hash_function,
            self.block_before,  # type: ignore[arg-type]  # a NewType of bytes
            self.tokens,
            self.extra_keys,
        )
        return Chunk(
            ChunkKey(key + grid.adapter + _TAIL),
            self.first_block,
            self.num_blocks,
            self.first_block * grid.block_tokens,
            (self.num_blocks - 1) * grid.block_tokens + len(self.tokens),
        )


def names_state(key: ChunkKey) -> bool:
    """Return whether `key` is that of a state of recurrent layers.

    True for one in 2^40 other chunks, if an adapter's fingerprint ends as names of states do.
    """
    return key.endswith(_STATE)


def is_mixed(request: Request) -> bool:
    """Return whether the prompt mixes token ids and embeddings.

    The KV of such a prompt must not be shared: vLLM's hashes cover both inputs, but not which of
    them applies at each position.
    """
    return request.prompt_is_token_ids is not None


def tail_of(request: Request, grid: Grid) -> Tail | None:
    """Return the tail of the prompt; None if it has none, see `Grid.num_in_tail`."""
    num_tokens = grid.num_in_tail(request)
    block = request.num_prompt_tokens // grid.block_tokens
    if not num_tokens or block > len(request.block_hashes):
        return None
    start = block * grid.block_tokens
    extra_keys, _ = generate_block_hash_extra_keys(request, start, start + num_tokens, 0)
    first_block = block // grid.chunk_blocks * grid.chunk_blocks
    return Tail(
        first_block,
        block + 1 - first_block,
        request.block_hashes[block - 1] if block else None,
        tuple(request.all_token_ids[start : start + num_tokens]),
        extra_keys,
    )


def stored_tokens(request: Request, grid: Grid) -> int:
    """Return how many tokens of the prompt an engine stores once it has computed all of them, and
    another one can load."""
    full_tokens = grid.num_loadable_blocks(request.num_prompt_tokens) * grid.block_tokens
    return min(
        request.num_prompt_tokens if grid.has_tail(request) else full_tokens,
        request.num_prompt_tokens - 1,
    )


@dataclass(frozen=True, slots=True)
class Prefix:
    """The chunks that may contain the KV of a request's tokens; each is named on demand.

    Cheap to create (microseconds). All values are immutable, so other threads may read it.
    """

    grid: Grid
    hashes: tuple[bytes, ...]
    """The hashes of all full blocks."""
    tail: Tail | None

    @classmethod
    def of(cls, request: Request, grid: Grid) -> "Prefix":
        """Return the prefix that `request` may load.

        A preempted request has output tokens too. Its full blocks are loadable. The tail of its
        prompt is left out if its tokens are part of a full block.
        """
        num_blocks = grid.num_loadable_blocks(request.num_tokens)
        has_same_end = num_blocks == grid.num_loadable_blocks(request.num_prompt_tokens)
        tail = tail_of(request, grid) if has_same_end else None
        return cls(grid, tuple(request.block_hashes[:num_blocks]), tail)

    @property
    def num_blocks(self) -> int:
        """The number of full blocks, plus one if there is a tail."""
        return len(self.hashes) + (self.tail is not None)

    @property
    def num_whole(self) -> int:
        """The number of whole chunks."""
        return len(self.hashes) // self.grid.chunk_blocks

    @property
    def identity(self) -> tuple[int, bytes, Tail | None, bytes]:
        """A value that is equal for two requests if all their chunks are."""
        last_hash = self.hashes[-1] if self.hashes else b""
        return len(self.hashes), last_hash, self.tail, self.grid.adapter

    def whole(self, number: int) -> Chunk:
        """Return whole chunk `number`."""
        first_block = number * self.grid.chunk_blocks
        return self.grid.run(self.hashes, first_block, first_block + self.grid.chunk_blocks)

    def partials(self, number: int, start_block: int = 0) -> list[Chunk]:
        """Return the partial chunks that may be stored in the place of chunk `number`, longest
        first: one for each block after `start_block` where a prompt or an answer may have ended."""
        first_block = number * self.grid.chunk_blocks
        longest = min(first_block + self.grid.chunk_blocks - 1, len(self.hashes))
        return [
            self.grid.run(self.hashes, first_block, end_block)
            for end_block in range(longest, max(first_block, start_block), -1)
        ]

    def chunks(self, start_block: int, hash_function: HashFunction) -> Iterator[Chunk]:
        """Yield the chunks that an engine stores if it computes the prefix from `start_block` on.

        The first chunk may begin before `start_block`.
        """
        for number in range(start_block // self.grid.chunk_blocks, self.num_whole):
            yield self.whole(number)
        if self.tail is not None:
            yield self.tail.chunk(self.grid, hash_function)
        else:
            yield from self.partials(self.num_whole, start_block)[:1]


def last_chunk(prefix: Prefix, hash_function: HashFunction) -> Chunk:
    """Return the last chunk that an engine stores if it computes all of `prefix`."""
    if prefix.tail is not None:
        return prefix.tail.chunk(prefix.grid, hash_function)
    return (prefix.partials(prefix.num_whole) or [prefix.whole(prefix.num_whole - 1)])[0]


def covered_tokens(request: Request, chunks: Sequence[Chunk]) -> int:
    """Return how many tokens of `request` have KV once `chunks`, ending with its last, are loaded.

    The last token is never counted: the engine computes it to sample the next one.
    """
    return min(chunks[-1].end_tokens, request.num_tokens - 1) if chunks else 0


def prompt_chunks(request: Request, grid: Grid, hash_function: HashFunction) -> tuple[Chunk, ...]:
    """Return all chunks of a prompt that another request can load, its tail included. O(chunks)."""
    num_blocks = grid.num_loadable_blocks(request.num_prompt_tokens)
    hashes = tuple(request.block_hashes[:num_blocks])
    prefix = Prefix(grid, hashes, tail_of(request, grid))
    return tuple(prefix.chunks(0, hash_function))
