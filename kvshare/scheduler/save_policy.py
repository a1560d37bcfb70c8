# SPDX-License-Identifier: Apache-2.0
"""Decides how much of each request is stored, by the options and by the request's own fields."""

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ecshare.plugin.sightings import Sightings, requested_save
from kvshare.chunks.prefix import Grid, HashFunction, prompt_chunks, stored_tokens
from kvshare.messages import is_for_decode

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvshare.config import KVConfig

_SAVE_FIELD = "kvshare_save"
"""The field of a request's `kv_transfer_params`."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Chunks that end after the first `end_tokens` tokens of a request are not stored."""

    end_tokens: int = sys.maxsize
    rule: str = ""
    """The name of an option, or `request`; empty: there is no limit."""


class SavePolicy:
    """Finds the limit of each request. Ownership: vLLM's scheduler thread."""

    def __init__(
        self,
        config: "KVConfig",
        hash_function: HashFunction,
        *,
        only_saves: bool,
        can_hold_state: bool = True,
    ) -> None:
        """Take the rules from `config`. `hash_function`: vLLM's own, for the names of tails.
        `only_saves`: by its role the engine loads nothing. `can_hold_state`: see save_budget.py.
        """
        self._only_saves = only_saves
        self._can_hold_state = can_hold_state
        self._save_after = config.save_after
        self._save_min_tokens = config.save_min_tokens
        self._saves_answers = config.save_answers
        self._hash_function = hash_function
        self._sightings = Sightings() if config.save_after > 1 else None

    def limit_of(self, request: "Request", grid: Grid) -> Limit:
        """Return up to which token `request` is stored. Call it once for each prompt, because it
        counts as a sighting. O(chunks), 2 us for each."""
        asked = requested_save(request.kv_transfer_params, _SAVE_FIELD)
        if asked is False:
            return Limit(0, "request")
        if not self._can_hold_state:
            return Limit(0, "buffer_bytes")
        if not (asked or self.is_for_decode(request)):
            if stored_tokens(request, grid) < self._save_min_tokens:
                return Limit(0, "save_min_tokens")
            end_tokens = self._often_seen(request, grid)
            if end_tokens < stored_tokens(request, grid):
                return Limit(end_tokens, "save_after")
        if not self._saves_answers:
            return Limit(request.num_prompt_tokens, "save_answers")
        return Limit()

    def is_for_decode(self, request: "Request") -> bool:
        """Return whether another engine decodes this prompt, and waits until its KV is stored.

        The request's fields say whether. Without them, it is true for a request for one token to an
        engine that only saves, as some proxies send it. For other engines, such a request may be a
        step of a beam search, or a score. A request that samples nothing, as for pooling, has a
        limit of one token too, but no other engine continues it.
        """
        if (said := is_for_decode(request)) is not None:
            return said
        samples = request.sampling_params is not None
        return self._only_saves and samples and request.max_tokens == 1

    def _often_seen(self, request: "Request", grid: Grid) -> int:
        """Return up to which token all chunks of the prompt were seen often enough."""
        if self._sightings is None:
            return request.num_prompt_tokens
        end_tokens, is_often = 0, True
        if grid.has_states:
            # A hit may end with any block, as long as its state is stored. Such blocks are large.
            grid = replace(grid, chunk_blocks=1)
        for chunk in prompt_chunks(request, grid, self._hash_function):
            # Every chunk is counted, because a later prompt may differ after any of them.
            is_often = self._sightings.add(chunk.key) >= self._save_after and is_often
            if is_often:
                end_tokens = chunk.end_tokens
        return end_tokens
