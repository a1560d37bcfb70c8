# SPDX-License-Identifier: Apache-2.0
"""Plans what to save, and when."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from kvshare.events import BlockEvents
from kvshare.facts import KVFacts
from kvshare.lookups import Lookups
from kvshare.messages import Piece
from kvshare.pieces import Pieces
from kvshare.prefix import Chunk, Grid, tail_of
from kvshare.save_budget import SaveBudget

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
    """Some of it is not saved. Nothing behind it is saved, as no reader could get there."""


class SavePlan:
    """Orders the saves of all requests. Ownership: vLLM's scheduler thread.

    A whole chunk, or the part that a prompt's full blocks end in, is saved by the step that fills
    its last block; a prompt's tail by the step that completes the prompt; the part that an answer
    ends in when the request leaves its blocks, at its end or preempted. By then vLLM has freed
    them: the order goes with the next step, and is carried out before anything of that step can
    fill them anew. A chunk of which vLLM has freed some blocks before, since no layer of its group
    looks back so far, is not saved.

    What the workers have no memory for is saved by a later step. What is left when a request
    leaves its blocks is given up.
    """

    def __init__(
        self,
        facts: KVFacts,
        pieces: Pieces,
        lookups: Lookups,
        events: BlockEvents | None,
        budget: SaveBudget[Progress],
    ) -> None:
        """Use what `lookups` knows to be stored and add to it. `events`: told what is ordered."""
        self._facts = facts
        self._pieces = pieces
        self._stored = lookups.stored
        self._adapters = lookups.adapters
        self._events = events
        self._budget = budget
        self._leaving: list[Piece] = []

    def computed(self, progress: Progress, step_tokens: int, end_tokens: int) -> Iterable[Piece]:
        """Yield what to save of a request once this step has computed it up to `end_tokens`.

        `step_tokens`: what of it is computed before this step. With asynchronous scheduling
        `end_tokens` runs ahead of the known tokens; a block counts when all its tokens are known,
        that is, hashed.
        """
        progress.step_tokens, progress.end_tokens = step_tokens, end_tokens
        grid = self._adapters.grid_of(progress.adapter)
        if grid is not None and not progress.has_gap:
            yield from self._save_due(progress, grid, end_tokens)

    def left(self, progress: Progress) -> int:
        """Order, with the next step, what to save of the blocks that a request has just lost.

        Return how many blocks and prompt tails are not saved, for want of memory or behind a gap.
        """
        # The latest token was sampled or, where tokens are guessed ahead, put right: either way
        # its KV is not computed.
        request, grid = progress.request, self._adapters.grid_of(progress.adapter)
        num_known = min(progress.end_tokens, request.num_tokens - 1)
        num_left = 0
        if grid is not None:
            end_block = min(num_known // grid.block_tokens, len(request.block_hashes))
            self._leaving += self._save_due(progress, grid, num_known)
            self._leaving += self._save_part(progress, grid, end_block)
            num_left = max(0, end_block - progress.num_saved_blocks)
            if progress.saved_prompt_tokens < request.num_prompt_tokens <= num_known:
                num_left += tail_of(request, grid) is not None
        progress.block_ids, progress.step_tokens, progress.end_tokens = [], 0, 0
        return num_left

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
        self._budget.withdraw(lost)
        return tuple(piece for piece in leaving if piece.key not in lost)

    def forget_leaving(self) -> None:
        """Order nothing of it: the blocks no longer hold what they did."""
        keys = {piece.key for piece in self._leaving}
        self._stored.lost(keys)
        self._budget.withdraw(keys)
        self._leaving.clear()

    def _save_due(self, progress: Progress, grid: Grid, end_tokens: int) -> Iterable[Piece]:
        """Order, as far as there is room, what is computed up to `end_tokens`: whole chunks, the
        part that the prompt's full blocks end in, and the prompt's tail."""
        request = progress.request
        end_block = min(end_tokens // grid.block_tokens, len(request.block_hashes))
        yield from self._save_whole(progress, grid, end_block)
        num_prompt_tokens = request.num_prompt_tokens
        num_prompt_blocks = num_prompt_tokens // grid.block_tokens
        if num_prompt_blocks <= end_block:
            yield from self._save_part(progress, grid, num_prompt_blocks)
        if progress.num_saved_blocks < num_prompt_blocks or end_tokens < num_prompt_tokens:
            return
        if progress.saved_prompt_tokens < num_prompt_tokens and num_prompt_tokens > 1:
            tail = tail_of(request, grid)
            chunk = tail.chunk(grid, self._facts.hash_function) if tail is not None else None
            pieces = self._save(progress, chunk) if chunk is not None else ()
            if pieces is not None:
                progress.saved_prompt_tokens = num_prompt_tokens
                yield from pieces

    def _save_whole(self, progress: Progress, grid: Grid, end_block: int) -> Iterable[Piece]:
        """Order the saves of whole chunks before `end_block` that were not considered yet."""
        size = grid.chunk_blocks
        for first in range(progress.num_saved_blocks // size * size, end_block - size + 1, size):
            pieces = self._save_run(progress, grid, first, first + size)
            if pieces is None:
                return
            yield from pieces

    def _save_part(self, progress: Progress, grid: Grid, end_block: int) -> Iterable[Piece]:
        """Order the save of the blocks before `end_block` that make no whole chunk, if all whole
        chunks before it were considered."""
        first = end_block // grid.chunk_blocks * grid.chunk_blocks
        if first <= progress.num_saved_blocks < end_block:
            yield from self._save_run(progress, grid, first, end_block) or ()

    def _save_run(
        self, progress: Progress, grid: Grid, first_block: int, end_block: int
    ) -> Sequence[Piece] | None:
        """As `_save`, of these blocks, which are considered then."""
        chunk = grid.run(progress.request.block_hashes, first_block, end_block)
        pieces = self._save(progress, chunk)
        if pieces is not None:
            progress.num_saved_blocks = max(progress.num_saved_blocks, end_block)
        return pieces

    def _save(self, progress: Progress, chunk: Chunk) -> Sequence[Piece] | None:
        """Return what to store of `chunk`, if it is not stored. None: not now, or never: a gap."""
        if progress.has_gap:
            return None
        if chunk.key in self._stored:
            return ()
        pieces = self._pieces.saved(chunk, progress.block_ids, progress.step_tokens)
        if not pieces:
            progress.has_gap = True
            return None
        num_bytes = sum(self._facts.slab_bytes(each.layer_set, each.num_blocks) for each in pieces)
        shards = self._facts.shard_names[self._facts.tp_size]
        if not self._budget.admit(chunk.key, num_bytes, len(shards), progress):
            return None
        self._stored.add(chunk.key)
        if self._events is not None:
            self._events.ordered(progress.request, chunk)
        return pieces
