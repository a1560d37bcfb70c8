# SPDX-License-Identifier: Apache-2.0
"""Recurrent states in vLLM's cache mode `align`; see `v1/worker/mamba_utils.py`."""

from collections.abc import Mapping

from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from lab.vllm_loop.model import Row


class RunningStates:
    """The place of each request's states: the block of its last computed token, in each group.

    The model reads and writes the states in the block of a step's last token. So before a step that
    ends in a later block, the runner copies them there. The block that is left keeps the states of
    exactly the tokens so far.
    """

    def __init__(self, cache: KVCacheConfig, kv_caches: Mapping[str, Tensor]) -> None:
        """`kv_caches`: the cache of each layer."""
        groups = {
            number: group
            for number, group in enumerate(cache.kv_cache_groups)
            if isinstance(group.kv_cache_spec, MambaSpec)
        }
        specs = [group.kv_cache_spec for group in groups.values()]
        for spec in specs:
            assert isinstance(spec, MambaSpec)
            assert spec.mamba_cache_mode == "align", "no other mode is simulated"
            assert not spec.num_speculative_blocks, "speculative decoding is not simulated"
        self.layers = frozenset(name for group in groups.values() for name in group.layer_names)
        """The names of the layers with a state."""
        self._block_tokens = specs[0].block_size if specs else 0
        self._caches = {
            number: [kv_caches[name] for name in group.layer_names]
            for number, group in groups.items()
        }
        self._places: dict[str, int] = {}

    def move(self, output: SchedulerOutput, rows: Mapping[str, Row]) -> None:
        """Copy the states of requests whose step ends in a later block.

        V1 forgets the place of a request that ends, is preempted or resumes. V2 learns it with the
        first step of a request, which a resumed one is too. For both it then follows from the
        number of computed tokens; later they remember it.
        """
        if not self.layers:
            return
        known = output.scheduled_cached_reqs
        news = [new.req_id for new in output.scheduled_new_reqs]
        preempted = output.preempted_req_ids or ()
        for request_id in (*output.finished_req_ids, *preempted, *known.resumed_req_ids, *news):
            self._places.pop(request_id, None)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            row = rows[request_id]
            start = row.num_computed_tokens
            before = self._places.get(request_id, (start - 1) // self._block_tokens)
            after = (start + num_tokens - 1) // self._block_tokens
            self._places[request_id] = after
            if before not in (-1, after):
                self._copy(row, before, after)

    def _copy(self, row: Row, before: int, after: int) -> None:
        for group, caches in self._caches.items():
            ids = row.block_ids[group]
            for cache in caches:
                cache[ids[after]] = cache[ids[before]]
