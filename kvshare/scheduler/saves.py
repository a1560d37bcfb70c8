# SPDX-License-Identifier: Apache-2.0
"""Plans what to save, and when."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from kvshare.chunks.facts import KVFacts
from kvshare.chunks.prefix import Chunk, ChunkKey, Grid, names_state, tail_of
from kvshare.chunks.recent_keys import RecentKeys
from kvshare.messages import Piece, Report
from kvshare.scheduler.cached_blocks import CachedBlocks
from kvshare.scheduler.events import BlockEvents
from kvshare.scheduler.pieces import Pieces
from kvshare.scheduler.save_budget import SaveBudget
from kvshare.scheduler.save_policy import Limit, SavePolicy

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

    from kvshare.scheduler.adapters import Adapter, Adapters


@dataclass(slots=True, eq=False)
class Progress:
    """How far one request is computed, and considered for saves. Compared by identity."""

    request: "Request"
    adapter: "Adapter"
    block_ids: list[list[int]] = field(default_factory=list)
    """The blocks in each cache group. vLLM has freed those before the window of the group's
    layers."""
    step_tokens: int = 0
    """The token up to which its blocks were computed before the latest step."""
    end_tokens: int = 0
    """The token up to which its blocks are computed, or will be by steps that were ordered."""
    num_saved_blocks: int = 0
    """The number of full blocks that were considered for a save, other than with the prompt's tail.
    Each block is considered once, even if it is a hit in vLLM's own cache: the store may have lost
    it."""
    loaded: range = range(0)
    """Blocks, in whole chunks, that were loaded, and so need not be saved."""
    saved_prompt_tokens: int = 0
    """The length of the prompt when its end was considered. A session's prompt grows."""
    num_lost_before: int = 0
    """The number of chunks that workers had ever reported as lost when the request was first
    seen."""
    has_gap: bool = False
    """A chunk is not saved. No chunk after it is saved, because no reader could use it. A state is
    no such chunk: later ones need only the chunks before them."""
    prompt_tokens: int = 0
    """The length of the prompt when `due_tokens` was computed."""
    due_tokens: int = 0
    """No further save is due until the request is computed up to this token."""
    asked_limit: Limit = Limit()
    """The limit by the options and the request."""
    own_tokens: int = sys.maxsize
    """The KV up to this token was computed by this engine or loaded by this connector. The rest was
    loaded by another connector, or computed on top of that. See siblings.py."""
    state_tokens: int = 0
    """The token after which a state of recurrent layers was last stored."""
    wanted_states: set[int] = field(default_factory=set)
    """The tokens after which a state is to be stored, and is not yet."""

    @property
    def is_foreign(self) -> bool:
        """Whether another connector has loaded some of its KV."""
        return self.own_tokens < sys.maxsize

    @property
    def limit(self) -> Limit:
        """The limit of what is saved."""
        if self.own_tokens < self.asked_limit.end_tokens:
            return Limit(self.own_tokens, "other_connector")
        return self.asked_limit

    def add_blocks(self, block_ids: Sequence[Sequence[int]], *, is_anew: bool) -> None:
        """Record further blocks of each cache group. `is_anew`: the request has no others."""
        if is_anew or not self.block_ids:
            self.block_ids = [[] for _ in block_ids]
        for known, new_ids in zip(self.block_ids, block_ids, strict=False):
            known += new_ids


class SavePlan:
    """Orders the saves of all requests. Ownership: vLLM's scheduler thread.

    A whole chunk, and the partial chunk at the end of a prompt without a tail, is saved by the step
    that fills its last block. A prompt's tail is saved by the step that completes the prompt. The
    partial chunk at the end of an answer is saved when the request ends or is preempted, also if
    the answer has filled no block: the next turn cannot use the tail. vLLM has freed its blocks
    then: the order is sent with the next step, and carried out before that step can refill the
    blocks. If vLLM has freed some of a chunk's blocks earlier, because no layer of their group
    looks back so far, the chunk is saved as long as vLLM's prefix cache has them.

    States of recurrent layers are saved as vLLM hands them over: those at the end of a prompt, and
    those at the end of a chunk that follow the last one by tokens whose chunks are as many bytes as
    a state. So states take at most half of the store, apart from those at the ends of prompts. Of a
    prompt that is stored up to where it was seen often enough, that is an end too. A state that is
    not handed over, or cannot be saved at once, is saved as long as vLLM's prefix cache has it.

    A prompt is saved as a whole: its first chunk is saved only if the workers have memory for all
    of it, which is then reserved. If a prompt needs more than they have in all, each chunk is saved
    for which there is memory. Chunks that cannot be saved now are saved by a later step, those of
    older requests first. Chunks that are not saved when a request loses its blocks are given up.
    """

    def __init__(  # noqa: PLR0913 — all that the scheduler half lends it
        self,
        facts: KVFacts,
        pieces: Pieces,
        stored: RecentKeys[ChunkKey],
        adapters: "Adapters",
        events: BlockEvents | None,
        budget: SaveBudget[Progress],
        policy: SavePolicy,
        cached: CachedBlocks,
    ) -> None:
        """Use what the scheduler half owns. `stored`: chunks that need not be saved. `cached`: the
        blocks in vLLM's own cache.

        Chunks whose save is ordered are added to `stored` and `events`.
        """
        self._facts = facts
        self._pieces = pieces
        self._stored = stored
        self._adapters = adapters
        self._events = events
        self._budget = budget
        self._policy = policy
        self._cached = cached
        self._leaving: list[Piece] = []
        self._whole: list[Progress] = []
        """Requests whose prompt is saved since the last `end_step`, except for its states."""
        self._waiting: dict[Progress, None] = {}
        """The requests that may have wanted states, in the order in which they first had some."""

    def computed(self, progress: Progress, step_tokens: int, end_tokens: int) -> Sequence[Piece]:
        """Return the pieces to save once this step has computed a request up to `end_tokens`.

        `step_tokens`: the number of tokens that were computed before this step. With asynchronous
        scheduling `end_tokens` is ahead of the known tokens. A block is considered when all its
        tokens are known, because it has a hash only then.
        """
        progress.step_tokens, progress.end_tokens = step_tokens, end_tokens
        is_same_prompt = progress.request.num_prompt_tokens == progress.prompt_tokens
        if progress.has_gap or (end_tokens < progress.due_tokens and is_same_prompt):
            return ()
        if is_same_prompt and self._budget.is_full(progress):
            return ()
        grid = self._adapters.grid_of(progress.adapter)
        if grid is None:
            return ()
        if not is_same_prompt:
            progress.asked_limit = self._policy.limit_of(progress.request, grid)
            if grid.has_states:
                progress.wanted_states.clear()
                self._want(progress, _state_ends(progress, grid))
        pieces = tuple(self._save_due(progress, grid, end_tokens))
        progress.prompt_tokens = progress.request.num_prompt_tokens
        progress.due_tokens = _due_tokens(progress, grid)
        return pieces

    def states(
        self, progress: Progress, handed_over: Iterable[tuple[int, int, int]]
    ) -> Iterable[Piece]:
        """Yield the pieces of states to save of those that vLLM hands over with this step, after
        `computed`. `handed_over`: cache group, block and tokens of each."""
        grid = self._adapters.grid_of(progress.adapter)
        if grid is None or progress.prompt_tokens != progress.request.num_prompt_tokens:
            # `computed` was not called for this prompt yet, so its limit is not known. vLLM also
            # hands over states that were loaded, while their request waits.
            return
        ends: dict[int, dict[int, int]] = {}
        for group, block, num_tokens in handed_over:
            if not num_tokens % grid.block_tokens:
                ends.setdefault(num_tokens, {})[group] = block
        for num_tokens, block_of_group in sorted(ends.items()):
            if num_tokens % grid.chunk_tokens == 0 and self._is_state_due(progress, num_tokens):
                self._want(progress, {num_tokens})
            if num_tokens in progress.wanted_states:
                yield from self._save_state(progress, grid, num_tokens, block_of_group)

    def waiting_states(self) -> Iterable[Piece]:
        """Yield the pieces of states to save that vLLM's cache has, of those that are computed and
        were not saved yet; after all calls of `states` for this step."""
        for progress in tuple(self._waiting):
            if not progress.wanted_states:
                del self._waiting[progress]
            elif not self._budget.is_full(progress, is_extra=True):
                yield from self._save_waiting(progress)

    def _want(self, progress: Progress, ends: AbstractSet[int]) -> None:
        """Have the states after these tokens saved as soon as it can be done."""
        progress.wanted_states |= ends
        self._waiting[progress] = None

    def _save_waiting(self, progress: Progress) -> Iterable[Piece]:
        """Yield the pieces of states of one request; see `waiting_states`."""
        grid = self._adapters.grid_of(progress.adapter)
        if grid is None:
            return
        hashes = progress.request.block_hashes
        for num_tokens in sorted(progress.wanted_states):
            end_block = num_tokens // grid.block_tokens
            if num_tokens > progress.end_tokens or end_block > len(hashes):
                return
            block_of_group = self._cached.state(hashes, end_block)
            yield from self._save_state(progress, grid, num_tokens, block_of_group)

    def _is_state_due(self, progress: Progress, num_tokens: int) -> bool:
        """Return whether the chunks since the last state are as many bytes as a state."""
        others = (*progress.wanted_states, progress.state_tokens)
        num_before = max((each for each in others if each < num_tokens), default=0)
        return num_tokens - num_before >= self._facts.state_tokens

    def _save_state(
        self, progress: Progress, grid: Grid, num_tokens: int, block_of_group: Mapping[int, int]
    ) -> Iterable[Piece]:
        """Yield the pieces of the state after `num_tokens`, and of the chunk that ends there.

        Yield none if there is no memory now. If it cannot be saved, it is wanted no more.
        """
        hashes, end_block = progress.request.block_hashes, num_tokens // grid.block_tokens
        is_allowed = num_tokens <= progress.limit.end_tokens and not progress.has_gap
        if not is_allowed or end_block > len(hashes):
            progress.wanted_states.discard(num_tokens)
            return
        first_block = (end_block - 1) // grid.chunk_blocks * grid.chunk_blocks
        chunk = grid.run(hashes, first_block, end_block)
        if num_tokens % grid.chunk_tokens:
            yield from self._save_part(progress, grid, end_block)
        state = grid.state_of(chunk)
        if state.key not in self._stored:
            pieces = self._pieces.saved_state(state, block_of_group)
            if not pieces:
                progress.wanted_states.discard(num_tokens)
                return
            is_extra = num_tokens not in _state_ends(progress, grid)
            is_ready = chunk.key in self._stored
            if not is_ready or not self._admit(progress, state, pieces, is_extra=is_extra):
                return
            yield from pieces
        progress.wanted_states.discard(num_tokens)
        progress.state_tokens = max(progress.state_tokens, num_tokens)

    def end_step(self) -> None:
        """Free the memory that is still reserved for prompts that are saved now; to be called after
        all calls of `computed` and `states` for this step."""
        for progress in self._whole:
            self._budget.release(progress)
        self._whole.clear()
        self._budget.remove_unreported()

    def loaded(self, progress: Progress | None, chunks: Sequence[Chunk], num_sound: int) -> None:
        """Record that a load of these consecutive chunks has ended, with `num_sound` of them
        loaded. `progress`: None if its request has ended."""
        for chunk in chunks[:num_sound]:
            self._stored.add(chunk.key)
        # The state of later chunks is unknown, so save all of them again.
        for chunk in chunks[num_sound:]:
            self._stored.discard(chunk.key)
        if progress is None:
            return
        grid, end = self._facts.grid, num_sound
        if end and chunks[end - 1].is_state:
            progress.state_tokens = chunks[end - 1].end_tokens
            end -= 1
        # The last ones may be partial chunks: the whole chunk is not stored.
        while end and chunks[end - 1].num_tokens < grid.chunk_tokens:
            end -= 1
        if end:
            end_block = chunks[end - 1].first_block + grid.chunk_blocks
            progress.loaded = range(chunks[0].first_block, end_block)

    def left(self, progress: Progress) -> tuple[int, int]:
        """Order, with the next step, the last saves of a request that has just lost its blocks.

        Return the numbers of blocks and tails that are not saved: first those for which there was
        no memory or that follow a gap, then those beyond the request's limit.
        """
        # The latest token was sampled, or corrected if it was a draft: its KV is not computed.
        request, grid = progress.request, self._adapters.grid_of(progress.adapter)
        num_known = min(progress.end_tokens, request.num_tokens - 1)
        num_left = num_declined = 0
        if grid is not None:
            end_block = min(num_known // grid.block_tokens, len(request.block_hashes))
            self._leaving += self._save_due(progress, grid, num_known)
            if grid.has_states:  # no state is stored where the answer ends
                end_block = max(
                    progress.num_saved_blocks, end_block // grid.chunk_blocks * grid.chunk_blocks
                )
            elif num_known <= request.num_prompt_tokens == progress.saved_prompt_tokens:
                end_block = progress.num_saved_blocks  # the rest is in the tail; no answer follows
            self._leaving += self._save_part(progress, grid, end_block)
            self._leaving += self._save_waiting(progress)
            num_left = max(0, end_block - progress.num_saved_blocks)
            num_allowed = progress.limit.end_tokens // grid.block_tokens
            num_declined = min(num_left, max(0, end_block - num_allowed))
            if progress.saved_prompt_tokens < request.num_prompt_tokens <= num_known:
                has_tail = tail_of(request, grid) is not None
                num_left += has_tail
                num_declined += has_tail and request.num_prompt_tokens > progress.limit.end_tokens
        progress.block_ids, progress.step_tokens, progress.end_tokens = [], 0, 0
        self._budget.release(progress)
        if progress.has_gap:
            return num_left, 0
        return num_left - num_declined, num_declined

    def ended(self, progress: Progress) -> tuple[int, int]:
        """Do `left` for a request that has ended."""
        found = self.left(progress)
        progress.wanted_states.clear()  # so that it waits for none
        return found

    def reported(self, report: Report) -> AbstractSet[ChunkKey]:
        """Process what workers report about chunks; return those that must be saved again."""
        # A chunk whose load has missed may be on its way to the store again.
        saving = {key for key in report.lost if self._budget.owner(key) is not None}
        lost = report.lost - saving | report.not_saved
        self._stored.lost(lost)
        for key in lost:
            progress = self._budget.owner(key)
            if progress is None:
                continue
            if names_state(key):
                progress.state_tokens = 0  # the next one is due as if none were stored
            else:
                self._stop(progress)
        self._budget.ended(report.ended)
        if self._events is not None:
            self._events.stored({key: n for key, n in report.ended.items() if key not in lost})
        return lost

    def _stop(self, progress: Progress) -> None:
        """Save no more of a request, because one of its chunks is not stored."""
        progress.has_gap = True
        self._budget.release(progress)

    def take_leaving(self, overwritten: AbstractSet[int]) -> tuple[Piece, ...]:
        """Return what `left` has ordered since the last call.

        `overwritten`: blocks that are overwritten before the workers carry out these orders.
        """
        leaving, self._leaving = self._leaving, []
        if not overwritten:
            return tuple(leaving)
        lost = {
            piece.key for piece in leaving if not overwritten.isdisjoint(chain(*piece.block_ids))
        }
        self._stored.lost(lost)
        self._budget.withdraw(lost)
        return tuple(piece for piece in leaving if piece.key not in lost)

    @property
    def has_leaving(self) -> bool:
        """Whether `left` has ordered any since `take_leaving`."""
        return bool(self._leaving)

    @property
    def is_crowded(self) -> bool:
        """Whether saves under way use more than half of the workers' memory."""
        return self._budget.is_crowded

    @property
    def reserved_bytes(self) -> int:
        """The memory of workers that is in use or reserved for saves."""
        return self._budget.reserved_bytes

    def take_events(self) -> "list[KVCacheEvent]":
        """Return the events about stored and lost blocks since the last call."""
        return self._events.take() if self._events is not None else []

    def forget(self, requests: Iterable[Progress]) -> None:
        """Save nothing more of these requests."""
        for progress in requests:
            self._stop(progress)
            progress.wanted_states.clear()
            self._waiting.pop(progress, None)
        self._whole.clear()
        self.forget_leaving()

    def forget_stored(self) -> None:
        """Regard nothing as stored any more."""
        self._stored.clear()

    def forget_leaving(self) -> None:
        """Cancel these orders, because the blocks have other contents now."""
        keys = {piece.key for piece in self._leaving}
        self._stored.lost(keys)
        self._budget.withdraw(keys)
        self._leaving.clear()

    def _save_due(self, progress: Progress, grid: Grid, end_tokens: int) -> Iterable[Piece]:
        """Order the saves up to `end_tokens` for which there is memory: whole chunks, and the
        prompt's tail or, without one, the partial chunk at the end of its full blocks."""
        request = progress.request
        end_block = min(end_tokens // grid.block_tokens, len(request.block_hashes))
        yield from self._save_whole(progress, grid, end_block)
        num_prompt_tokens = request.num_prompt_tokens
        num_prompt_blocks = num_prompt_tokens // grid.block_tokens
        due_block = num_prompt_blocks
        if grid.num_in_tail(request):
            due_block -= num_prompt_blocks % grid.chunk_blocks
        elif num_prompt_blocks <= end_block:
            yield from self._save_part(progress, grid, num_prompt_blocks)
        if progress.num_saved_blocks < due_block or end_tokens < num_prompt_tokens:
            return
        if progress.saved_prompt_tokens < num_prompt_tokens and num_prompt_tokens > 1:
            tail = tail_of(request, grid)
            chunk = tail.chunk(grid, self._facts.hash_function) if tail is not None else None
            pieces = self._save(progress, chunk) if chunk is not None else ()
            if pieces is not None:
                progress.saved_prompt_tokens = num_prompt_tokens
                self._whole.append(progress)
                yield from pieces

    def _save_whole(self, progress: Progress, grid: Grid, end_block: int) -> Iterable[Piece]:
        """Order the saves of whole chunks before `end_block` that were not considered before."""
        size = grid.chunk_blocks
        first, end_block = progress.num_saved_blocks // size * size, end_block // size * size
        while first < end_block:
            if first in progress.loaded and not progress.has_gap:
                # In one step: to visit hundreds of chunks takes too long for a hook.
                first = min(progress.loaded.stop, end_block)
                progress.num_saved_blocks = max(progress.num_saved_blocks, first)
                continue
            pieces = self._save_run(progress, grid, first, first + size)
            if pieces is None:
                return
            yield from pieces
            first += size

    def _save_part(self, progress: Progress, grid: Grid, end_block: int) -> Iterable[Piece]:
        """Order the save of the partial chunk before `end_block`, if all whole chunks before it
        were considered."""
        first = end_block // grid.chunk_blocks * grid.chunk_blocks
        if first <= progress.num_saved_blocks < end_block:
            yield from self._save_run(progress, grid, first, end_block) or ()

    def _save_run(
        self, progress: Progress, grid: Grid, first_block: int, end_block: int
    ) -> Sequence[Piece] | None:
        """Do `_save` for these blocks, and mark them as considered."""
        chunk = grid.run(progress.request.block_hashes, first_block, end_block)
        pieces = self._save(progress, chunk)
        if pieces is not None:
            progress.num_saved_blocks = max(progress.num_saved_blocks, end_block)
        return pieces

    def _save(self, progress: Progress, chunk: Chunk) -> Sequence[Piece] | None:
        """Return the pieces of `chunk` to store; none if it is stored. None: there is no memory
        now, or it follows a gap, or is beyond the request's limit."""
        if progress.has_gap:
            return None
        if chunk.key in self._stored:
            return ()
        if chunk.end_tokens > progress.limit.end_tokens:
            return None
        passed = partial(self._cached.run, progress.request.block_hashes)
        pieces = self._pieces.saved(chunk, progress.block_ids, progress.step_tokens, passed)
        if not pieces:
            self._stop(progress)
            return None
        if not self._admit(progress, chunk, pieces):
            return None
        if self._events is not None:
            self._events.ordered(progress.request, chunk)
        return pieces

    def _admit(
        self, progress: Progress, chunk: Chunk, pieces: Iterable[Piece], *, is_extra: bool = False
    ) -> bool:
        """Reserve memory for `pieces` of `chunk`, which count as stored then; False: there is
        none. `is_extra`: see `SaveBudget.admit`."""
        num_bytes = sum(self._facts.slab_bytes(each.layer_set, each.num_blocks) for each in pieces)
        num_objects = len(self._facts.names_of(chunk, self._facts.tp_size))
        rest_bytes = self._rest_bytes(progress, chunk)
        is_admitted = self._budget.admit(
            chunk.key, num_bytes, num_objects, progress, rest_bytes, is_extra=is_extra
        )
        if is_admitted:
            self._stored.add(chunk.key)
        return is_admitted

    def _rest_bytes(self, progress: Progress, chunk: Chunk) -> int:
        """Return how much memory the chunks of the prompt after `chunk`, and the states at its end,
        need at most."""
        grid, chunk_bytes, request = self._facts.grid, self._facts.chunk_bytes, progress.request
        end_tokens = request.num_prompt_tokens - 1
        if not grid.has_tail(request):
            end_tokens = request.num_prompt_tokens // grid.block_tokens * grid.block_tokens
        end_tokens = min(end_tokens, progress.limit.end_tokens)
        num_tokens = max(0, end_tokens - chunk.end_tokens)
        num_whole, num_blocks = divmod(-(-num_tokens // grid.block_tokens), grid.chunk_blocks)
        num_bytes = num_whole * chunk_bytes(grid.chunk_blocks)
        if num_blocks:
            num_bytes += chunk_bytes(num_blocks)
        if grid.has_states:
            # A chunk is saved before the state at its end.
            first = chunk.end_tokens + chunk.is_state
            ends = [end for end in _state_ends(progress, grid) if first <= end <= end_tokens]
            num_bytes += len(ends) * self._facts.state_bytes
        return num_bytes


def _state_ends(progress: Progress, grid: Grid) -> set[int]:
    """Return after how many tokens of the prompt a state is stored in any case: the most that the
    same prompt can load, the most that one that continues it can load, and the most that others
    share with it by the option `save_after`."""
    num_tokens, size = progress.request.num_prompt_tokens, grid.block_tokens
    ends = {(num_tokens - 1) // size * size, num_tokens // size * size}
    if progress.limit.rule == "save_after":
        ends.add(progress.limit.end_tokens)
    return {end for end in ends if 0 < end <= progress.limit.end_tokens}


def _due_tokens(progress: Progress, grid: Grid) -> int:
    """Return the token up to which a request must be computed before a further save is due."""
    due_tokens = _next_end(progress, grid)
    return due_tokens if due_tokens <= progress.limit.end_tokens else sys.maxsize


def _next_end(progress: Progress, grid: Grid) -> int:
    """Return where the next chunk ends that was not considered, or the end of the prompt, if that
    was not considered."""
    num_whole = progress.num_saved_blocks // grid.chunk_blocks
    next_chunk = (num_whole + 1) * grid.chunk_tokens
    request, num_prompt_tokens = progress.request, progress.request.num_prompt_tokens
    if progress.saved_prompt_tokens >= num_prompt_tokens or num_prompt_tokens <= 1:
        return next_chunk
    num_prompt_blocks = num_prompt_tokens // grid.block_tokens
    has_part = progress.num_saved_blocks < num_prompt_blocks and not grid.num_in_tail(request)
    prompt_end = num_prompt_blocks * grid.block_tokens if has_part else num_prompt_tokens
    return min(next_chunk, prompt_end)
