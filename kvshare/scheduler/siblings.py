# SPDX-License-Identifier: Apache-2.0
"""Detects KV that other connectors below vLLM's MultiConnector, the siblings, have loaded.

This connector has not verified the KV that a sibling loads. It may be wrong without an error: NIXL
reads the memory of P, and P may have filled it with other prompts by then. So such KV is not
stored, and neither is KV computed from it. Stored under the name of right KV, it would spoil the
answers of all engines that share the store.

vLLM reports to each connector only its own loads. A sibling's load is detected indirectly: vLLM
begins to compute the request after its local hit and our load, or the request waits for a load that
is not ours. The blocks of such a request are recorded, because they may become local hits of other
requests.

Blocks of a prompt that mixes token ids and embeddings are recorded too: vLLM may give them to
another prompt with equal hashes.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshare.chunks.prefix import is_mixed
from kvshare.messages import is_prefilled_elsewhere
from kvshare.scheduler.pieces import BlocksOfGroups
from kvshare.scheduler.saves import Progress

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

# vLLM's placeholder for blocks that no layer of a group needs any more. It holds no KV.
_NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class _Admission:
    progress: Progress
    local_tokens: int
    loaded_tokens: int
    block_ids: Callable[[], BlocksOfGroups]
    names_source: bool


class Siblings:
    """Records the blocks that siblings have loaded. Ownership: vLLM's scheduler thread.

    As long as no sibling loads anything, this costs a few comparisons per request.
    """

    def __init__(self, block_tokens: int) -> None:
        """Record no blocks yet. `block_tokens`: tokens of vLLM's blocks."""
        self._block_tokens = block_tokens
        self._admitted: dict[str, _Admission] = {}
        # (group, block) of blocks that a sibling has loaded, and of those computed from them. They
        # may have been freed since. At most all blocks of the cache.
        self._foreign: set[tuple[int, int]] = set()
        # The requests that got blocks for a load, by any connector, and do not run yet.
        self._waiting: dict[str, Request] = {}
        self.fetch = True
        """True if a sibling takes requests that name their source: it took the latest one, or there
        was none yet."""

    def admitted(
        self,
        progress: Progress,
        local_tokens: int,
        loaded_tokens: int,
        block_ids: Callable[[], BlocksOfGroups],
        *,
        names_source: bool,
    ) -> None:
        """Record that vLLM gave blocks to a request.

        `local_tokens`: of its local hit. `loaded_tokens`: which we load after these. `block_ids`:
        returns all its blocks, in order, of each cache group; called only in `scheduled`.
        `names_source`: its params named a source when vLLM last asked about it.
        """
        request = progress.request
        if request.num_computed_tokens:
            # A load has ended, or a session continues: the request had these blocks before.
            local_tokens, loaded_tokens = request.num_computed_tokens, 0
        self._admitted[request.request_id] = _Admission(
            progress, local_tokens, loaded_tokens, block_ids, names_source
        )

    def are_foreign(self, block_of_group: Mapping[int, int]) -> bool:
        """Return whether one of these blocks, given by cache group, holds foreign KV."""
        return not self._foreign.isdisjoint(block_of_group.items())

    @property
    def has_waiting(self) -> bool:
        """Whether a request waits for a load, or to run after one."""
        return bool(self._waiting)

    def has_failed(self, request: "Request") -> bool:
        """Return whether a load of `request`, which vLLM asks about, has failed as a whole."""
        return request.request_id in self._waiting

    def another_failed(self, request: "Request") -> bool:
        """Return whether a load of another request failed as a whole, and that waits to run.

        vLLM has freed its blocks, and still reserves as many. As long as `request` is offered a
        load that does not fit beside these, neither it nor any request behind it is admitted.
        """
        return any(
            not each.num_computed_tokens
            for name, each in self._waiting.items()
            if name != request.request_id
        )

    def finished(self, request_id: str) -> None:
        """Remove a request."""
        self._waiting.pop(request_id, None)

    def scheduled(
        self, output: "SchedulerOutput", progress_of: Callable[[str], Progress | None]
    ) -> None:
        """Set `own_tokens` of the requests that this step has admitted, before the step runs.

        In the order in which vLLM gave out blocks, because a request may have a local hit on blocks
        of an earlier one.
        """
        cached = output.scheduled_cached_reqs
        if self._foreign:
            for name, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if block_ids and name not in cached.resumed_req_ids:
                    progress = progress_of(name)
                    self._record(block_ids, 0, is_foreign=progress is None or progress.is_foreign)
        if not self._admitted:
            return
        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        if cached.resumed_req_ids:
            begins |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._judge(begins)
        self._admitted.clear()

    def _judge(self, begins: Mapping[str, int]) -> None:
        for name, admission in self._admitted.items():
            if admission.names_source:
                self.fetch = not is_prefilled_elsewhere(admission.progress.request)
            own_tokens = admission.local_tokens + admission.loaded_tokens
            if name in begins:
                self._waiting.pop(name, None)
                has_sibling_loaded = begins[name] > own_tokens
            else:  # it waits for a load
                has_sibling_loaded = not admission.loaded_tokens
                self._waiting[name] = admission.progress.request
            is_foreign = has_sibling_loaded or is_mixed(admission.progress.request)
            self._set_own(admission, is_foreign=is_foreign)

    def _set_own(self, admission: _Admission, *, is_foreign: bool) -> None:
        """Set `own_tokens` of a request. `is_foreign`: the KV after its local hit is foreign."""
        progress, own_tokens = admission.progress, sys.maxsize
        if is_foreign or self._foreign:
            block_ids = admission.block_ids()
            num_local = -(-admission.local_tokens // self._block_tokens)
            first = self._first_foreign(block_ids, num_local)
            if first is None and is_foreign:
                first = num_local
            if first is not None:
                own_tokens = first * self._block_tokens
            self._record(block_ids, num_local, is_foreign=first is not None)
        if progress.own_tokens != own_tokens:
            progress.own_tokens, progress.due_tokens = own_tokens, 0

    def _first_foreign(self, block_ids: BlocksOfGroups, num_local: int) -> int | None:
        """Return the first foreign one of the first `num_local` blocks."""
        places = (
            place
            for group, ids in enumerate(block_ids)
            for place, block in enumerate(ids[:num_local])
            if (group, block) in self._foreign
        )
        return min(places, default=None)

    def _record(self, block_ids: BlocksOfGroups, first: int, *, is_foreign: bool) -> None:
        """Record whether the new blocks, from number `first` on, will hold foreign KV."""
        for group, ids in enumerate(block_ids):
            blocks = {(group, block) for block in ids[first:] if block != _NULL_BLOCK}
            if is_foreign:
                self._foreign |= blocks
            else:
                self._foreign -= blocks
