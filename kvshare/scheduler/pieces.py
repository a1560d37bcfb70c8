# SPDX-License-Identifier: Apache-2.0
"""Splits a chunk into pieces: one stored object for each layer set; pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add

from kvshare.chunks.layers import LayerSet
from kvshare.chunks.prefix import Chunk
from kvshare.messages import Piece

BlocksOfGroups = Sequence[Sequence[int]]
"""All blocks of a request, in order, in each of the engine's cache groups."""

NULL_BLOCK = 0
"""vLLM's placeholder in block tables. It belongs to no request."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Splits the chunks of one engine into pieces."""

    layer_sets: tuple[LayerSet, ...]
    block_tokens: int

    def loaded(
        self, chunk: Chunk, block_ids: BlocksOfGroups, start_tokens: int, end_tokens: int
    ) -> Iterator[Piece]:
        """Yield the pieces of `chunk` to load for a request that has KV up to `start_tokens` and
        will be computed from `end_tokens` on.

        Raises:
            ValueError: vLLM has allocated no block for a state, or does not compute from its end
                on.
        """
        end_block = min(_end_block(chunk), -(-end_tokens // self.block_tokens))
        for layer_set in self._layer_sets_in(chunk):
            needed_block = layer_set.window.first_needed(end_tokens) // self.block_tokens
            stored_block = layer_set.first_block(chunk, self.block_tokens)
            first = max(start_tokens // self.block_tokens, needed_block, stored_block)
            if first < end_block:
                ids = _of_groups(layer_set, block_ids, first, end_block)
                if chunk.is_state and ((NULL_BLOCK,) in ids or chunk.end_tokens != end_tokens):
                    raise ValueError(
                        f"no place for the state at token {chunk.end_tokens}: blocks {ids}, "
                        f"computed from token {end_tokens} on"
                    )
                yield self._piece(chunk, layer_set, ids, first - stored_block)

    def saved(
        self,
        chunk: Chunk,
        block_ids: BlocksOfGroups,
        step_tokens: int,
        passed: Callable[[Sequence[int], int, int], tuple[tuple[int, ...], ...]],
    ) -> list[Piece]:
        """Return the pieces of `chunk` to store; none if it can no longer be stored as a whole.

        `step_tokens`: the request was computed up to there before this step. For layers with a
        window, vLLM may have freed the blocks that it does not need from there on. `passed`:
        returns such blocks of some cache groups, from one number to before another; none if vLLM
        has reused one of them for other tokens.
        """
        pieces = []
        for layer_set in self._layer_sets_in(chunk):
            first, end = layer_set.first_block(chunk, self.block_tokens), _end_block(chunk)
            kept = layer_set.window.first_needed(step_tokens) // self.block_tokens
            kept = min(max(first, kept), end)
            ids = _of_groups(layer_set, block_ids, kept, end)
            if first < kept:
                before = passed(layer_set.groups, first, kept)
                if not before:
                    return []
                ids = tuple(map(add, before, ids))
            pieces.append(self._piece(chunk, layer_set, ids))
        return pieces

    def saved_state(self, state: Chunk, block_of_group: Mapping[int, int]) -> list[Piece]:
        """Return the pieces of `state` to store, in the block of each cache group; none if the
        block of a group is not given."""
        sets = list(self._layer_sets_in(state))
        if not all(group in block_of_group for each in sets for group in each.groups):
            return []
        return [
            self._piece(state, each, tuple((block_of_group[group],) for group in each.groups))
            for each in sets
        ]

    def _layer_sets_in(self, chunk: Chunk) -> Iterator[LayerSet]:
        return (each for each in self.layer_sets if each.is_in(chunk))

    def _piece(
        self,
        chunk: Chunk,
        layer_set: LayerSet,
        block_ids: tuple[tuple[int, ...], ...],
        first_block: int = 0,
    ) -> Piece:
        stored_block = layer_set.first_block(chunk, self.block_tokens)
        num_blocks = _end_block(chunk) - stored_block
        num_tokens = chunk.end_tokens - stored_block * self.block_tokens
        return Piece(chunk.key, num_blocks, num_tokens, block_ids, first_block, layer_set.number)


def _end_block(chunk: Chunk) -> int:
    return chunk.first_block + chunk.num_blocks


def _of_groups(
    layer_set: LayerSet, block_ids: BlocksOfGroups, first: int, end: int
) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(block_ids[group][first:end]) for group in layer_set.groups)
