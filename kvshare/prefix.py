# SPDX-License-Identifier: Apache-2.0
"""A request's tokens -> the chunks that hold their KV; pure.

A chunk is one full cache block, named by vLLM's own chained hash, or the tail of a prompt: the
tokens of its last, partly filled block but for the very last one, which the reader computes itself.
vLLM's hashes cover the tokens, all tokens before them, the media, the LoRA adapter and the
cache_salt, so equal names mean equal KV.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NewType

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.request import Request

ChunkKey = NewType("ChunkKey", bytes)
HashFunction = Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored unit: block number `index` of a request, of which `num_tokens` count."""

    key: ChunkKey
    index: int
    start_tokens: int
    num_tokens: int

    @property
    def end_tokens(self) -> int:
        """The first token after it."""
        return self.start_tokens + self.num_tokens


def full_chunk(request: Request, index: int, block_tokens: int) -> Chunk:
    """Return the chunk of block `index`, which must be full: its hash is known."""
    key = ChunkKey(request.block_hashes[index])
    return Chunk(key, index, index * block_tokens, block_tokens)


def tail_chunk(request: Request, block_tokens: int, hash_function: HashFunction) -> Chunk | None:
    """Return the tail of the prompt; None if full blocks hold all but its last token.

    The name is made as vLLM makes a block's, over fewer tokens: it can equal no block's name.
    """
    index, num_tokens = divmod(request.num_prompt_tokens - 1, block_tokens)
    if not num_tokens or num_tokens == block_tokens - 1 or index > len(request.block_hashes):
        return None
    start = index * block_tokens
    extra_keys, _ = generate_block_hash_extra_keys(request, start, start + num_tokens, 0)
    key = hash_block_tokens(
        hash_function,
        request.block_hashes[index - 1] if index else None,
        request.all_token_ids[start : start + num_tokens],
        extra_keys,
    )
    return Chunk(ChunkKey(key), index, start, num_tokens)


def loadable_chunks(
    request: Request, block_tokens: int, hash_function: HashFunction, start_tokens: int
) -> tuple[Chunk, ...]:
    """Return the chunks from token `start_tokens` (whole blocks) on, in order.

    A request that was preempted has output tokens too; its full blocks are loadable, while the
    tail of its prompt is part of one of them and is left out.
    """

    def walk() -> Iterator[Chunk]:
        for index in range(start_tokens // block_tokens, len(request.block_hashes)):
            yield full_chunk(request, index, block_tokens)
        if request.num_tokens == request.num_prompt_tokens:
            tail = tail_chunk(request, block_tokens, hash_function)
            if tail is not None and tail.start_tokens >= start_tokens:
                yield tail

    return tuple(walk())


def num_leading(found: Sequence[bool]) -> int:
    """Return how many entries are true before the first that is not."""
    return next((index for index, is_there in enumerate(found) if not is_there), len(found))


def covered_tokens(request: Request, chunks: Sequence[Chunk]) -> int:
    """Return up to which token `request` is covered once `chunks`, its latest ones, are loaded.

    The last token is never covered: the engine computes it to sample the next one.
    """
    return min(chunks[-1].end_tokens, request.num_tokens - 1) if chunks else 0
