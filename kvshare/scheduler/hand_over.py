# SPDX-License-Identifier: Apache-2.0
"""Announces to the next engine how much of a prompt is stored."""

from itertools import takewhile
from typing import Any

from vllm.v1.request import Request

from ecshare.store.keys import Kind, object_key
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import GiveUp
from kvshare.chunks.facts import KVFacts
from kvshare.chunks.prefix import ChunkKey, Grid, prompt_chunks, stored_tokens
from kvshare.chunks.recent_keys import RecentKeys
from kvshare.messages import announcement, wants_announcement
from kvshare.scheduler.adapters import Adapters
from kvshare.scheduler.save_policy import SavePolicy
from kvshare.scheduler.saves import Progress


class HandOver:
    """Announces tokens of prompts: no more than are stored or being saved, as far as is known.

    The next engine waits for what is announced. Of a prompt that it may wait for as a whole, the
    rest is given up.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(
        self,
        facts: KVFacts,
        engine: TransferEngine,
        adapters: Adapters,
        stored: RecentKeys[ChunkKey],
        policy: SavePolicy,
    ) -> None:
        """Use what the scheduler half owns. `stored`: chunks that are stored or being saved."""
        self._facts = facts
        self._engine = engine
        self._adapters = adapters
        self._stored = stored
        self._policy = policy
        self._saves_fail = False
        self.num_lost = 0
        """The number of chunks that workers have ever reported as lost."""

    def move(self, facts: KVFacts) -> None:
        """Use the namespace of `facts` from now on."""
        self._facts = facts

    def reported(self, num_lost: int, *, saves_fail: bool) -> None:
        """Record that workers have lost `num_lost` chunks. `saves_fail`: as they report it."""
        self.num_lost += num_lost
        self._saves_fail = saves_fail

    def announce(self, request: Request, progress: Progress) -> dict[str, Any] | None:
        """Return the announcement for a request that has ended; None if there is none."""
        is_for_decode = self._policy.is_for_decode(request)
        if not (is_for_decode or wants_announcement(request)):
            return None
        grid = self._adapters.grid_of(progress.adapter)
        if grid is None:
            return None
        num_tokens = 0 if self._saves_fail else self._num_tokens(progress, grid)
        if is_for_decode and num_tokens != stored_tokens(request, grid):
            self._give_up_rest(request, grid, num_tokens)
        if not num_tokens:
            return None
        return announcement(num_tokens, self._facts.tp_size, self._facts.num_stages)

    def _num_tokens(self, progress: Progress, grid: Grid) -> int:
        """Return how many tokens of the prompt are stored or being saved."""
        request = progress.request
        is_whole = progress.saved_prompt_tokens == request.num_prompt_tokens
        is_sure = is_whole and progress.num_lost_before == self.num_lost and not progress.has_gap
        if is_sure and not grid.has_states:
            return stored_tokens(request, grid)
        ordered = list(prompt_chunks(request, grid, self._facts.hash_function))
        if not is_sure:
            # Some of it was not saved, or a save has failed, perhaps of a chunk of this prompt.
            ordered = list(takewhile(lambda chunk: chunk.key in self._stored, ordered))
        if grid.has_states:  # there may have been no memory for the last ones
            while ordered and grid.state_of(ordered[-1]).key not in self._stored:
                ordered.pop()
        return min(ordered[-1].end_tokens, request.num_prompt_tokens - 1) if ordered else 0

    def _give_up_rest(self, request: Request, grid: Grid, num_tokens: int) -> None:
        """Leave a note that the prompt will not be stored after its first `num_tokens`.

        A reader looks for the note of what it waits for: the first chunk that is missing, or the
        state at the end.
        """
        chunks = grid.with_state(prompt_chunks(request, grid, self._facts.hash_function))
        rest = [each for each in chunks if each.end_tokens > num_tokens]
        if grid.has_states and not self._saves_fail:
            # Chunks after the last state may be stored, and are not announced.
            rest = [each for each in rest if each.key not in self._stored]
        if rest:
            name = bytes(rest[0].key)
            self._engine.submit(GiveUp(object_key(Kind.KV, self._facts.namespace, name)))
