# SPDX-License-Identifier: Apache-2.0
"""Plans what to save, and when."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from kvshare.events import BlockEvents
from kvshare.facts import KVFacts
from kvshare.lookups import Lookups
from kvshare.messages import Piece
from kvshare.pieces import Pieces
from kvshare.prefix import Chunk, Grid, tail_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvshare.adapters import Adapter


@dataclass(slots=True)
class Progress:
    """How far one request is computed, and considered for saves."""

    request: "Request"
    adapter: "Adapter"
    block_ids: list[list[int]] = field(default_factory=list)
    """Of each cache group. vLLM has freed those before the span of the layers of a group."""
    step_tokens: int = 0
    """Up to where its blocks were computed before the latest step."""
    end_tokens: int = 0
    """Up to where its blocks are computed, or will be by steps that have been ordered."""
    num_saved_blocks: int = 0
    """Up to where full blocks were considered for a save; each is once, wherever its KV is from: a
    block of the local cache may be one that the store has lost."""
    saved_prompt_tokens: int = 0
    """Of the prompt that was considered to its end. A session's grows with each turn."""
    has_gap: bool = False
    """Some of it could not be saved any more, and may not be stored."""


class SavePlan:
    """Orders the saves of all requests. Ownership: vLLM's scheduler thread.

    A whole chunk, or the part that a prompt's full blocks end in, is saved by the step that fills
    its last block; a prompt's tail by the step that completes the prompt; the part that an answer
    ends in when the request leaves its blocks, at its end or preempted. By then vLLM has freed
    them: the order goes with the next step, and is carried out before anything of that step can
    fill them anew. A chunk of which vLLM has freed some blocks before, since no layer of its group
    looks back so far, is not saved.
    """

    def __init__(
        self, facts: KVFacts, pieces: Pieces, lookups: Lookups, events: BlockEvents | None
    ) -> None:
        """Use what `lookups` knows to be stored and add to it. `events`: told what is ordered."""
        self._facts = facts
        self._pieces = pieces
        self._stored = lookups.stored
        self._adapters = lookups.adapters
        self._events = events
        self._leaving: list[Piece] = []

    def computed(self, progress: Progress, step_tokens: int, end_tokens: int) -> Iterable[Piece]:
        """Yield what to save of a request once this step has computed it up to `end_tokens`.

        `step_tokens`: what of it is computed before this step. With asynchronous scheduling
        `end_tokens` runs ahead of the known tokens; a block counts when all its tokens are known,
        that is, hashed.
        """
        progress.step_tokens, progress.end_tokens = step_tokens, end_tokens
        request, grid = progress.request, self._adapters.grid_of(progress.adapter)
        if grid is None:
            return
        end_block = min(end_tokens // grid.block_tokens, len(request.block_hashes))
        yield from self._save_whole(progress, grid, end_block)
        num_prompt_blocks = request.num_prompt_tokens // grid.block_tokens
        if progress.num_saved_blocks < num_prompt_blocks <= end_block:
            yield from self._save_part(progress, grid, num_prompt_blocks)
        num_prompt_tokens = request.num_prompt_tokens
        if progress.saved_prompt_tokens < num_prompt_tokens and 1 < num_prompt_tokens <= end_tokens:
            progress.saved_prompt_tokens = num_prompt_tokens
            tail = tail_of(request, grid)
            if tail is not None:
                yield from self._save(progress, tail.chunk(grid, self._facts.hash_function))

    def left(self, progress: Progress) -> None:
        """Order, with the next step, what to save of the blocks that a request has just lost."""
        # The latest token was sampled or, where tokens are guessed ahead, put right: either way
        # its KV is not computed.
        request, grid = progress.request, self._adapters.grid_of(progress.adapter)
        num_known = min(progress.end_tokens, request.num_tokens - 1)
        end_block = min(num_known // self._facts.grid.block_tokens, len(request.block_hashes))
        if grid is not None and end_block > progress.num_saved_blocks:
            self._leaving += self._save_whole(progress, grid, end_block)
            self._leaving += self._save_part(progress, grid, end_block)
        progress.block_ids, progress.step_tokens, progress.end_tokens = [], 0, 0

    def take_leaving(self, zeroed: Collection[int]) -> tuple[Piece, ...]:
        """Return what `left` has ordered since the last call.

        `zeroed`: blocks that the workers zero before this step, and V2 runners before they carry
        out these orders. What lies in them is given up.
        """
        leaving, self._leaving = self._leaving, []
        gone = set(zeroed)
        if not gone:
            return tuple(leaving)
        lost = {piece.key for piece in leaving if not gone.isdisjoint(chain(*piece.block_ids))}
        self._stored.lost(lost)
        return tuple(piece for piece in leaving if piece.key not in lost)

    def forget_leaving(self) -> None:
        """Order nothing of it: the blocks no longer hold what they did."""
        self._leaving.clear()

    def _save_whole(self, progress: Progress, grid: Grid, end_block: int) -> Iterable[Piece]:
        """Order the saves of whole chunks before `end_block` that were not considered yet."""
        size = grid.chunk_blocks
        end_chunk = end_block // size
        for number in range(progress.num_saved_blocks // size, end_chunk):
            yield from self._save_run(progress, grid, number * size, (number + 1) * size)
        progress.num_saved_blocks = max(progress.num_saved_blocks, end_chunk * size)

    def _save_part(self, progress: Progress, grid: Grid, end_block: int) -> Iterable[Piece]:
        """Order the save of the blocks before `end_block` that make no whole chunk."""
        size = grid.chunk_blocks
        yield from self._save_run(progress, grid, end_block // size * size, end_block)
        progress.num_saved_blocks = max(progress.num_saved_blocks, end_block)

    def _save_run(
        self, progress: Progress, grid: Grid, first_block: int, end_block: int
    ) -> Iterable[Piece]:
        if first_block < end_block:
            chunk = grid.run(progress.request.block_hashes, first_block, end_block)
            yield from self._save(progress, chunk)

    def _save(self, progress: Progress, chunk: Chunk) -> Iterable[Piece]:
        if chunk.key in self._stored:
            return
        pieces = self._pieces.saved(chunk, progress.block_ids, progress.step_tokens)
        if not pieces:
            progress.has_gap = True
            return
        self._stored.add(chunk.key)
        if self._events is not None:
            self._events.ordered(progress.request, chunk)
        yield from pieces
