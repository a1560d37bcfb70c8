# SPDX-License-Identifier: Apache-2.0
"""Decides how much of each request is stored: by the options, and by what the request says."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ecshare.plugin.save_policy import Sightings, is_for_another_engine, requested_save
from kvshare.prefix import Grid, HashFunction, prompt_chunks, stored_tokens

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvshare.config import KVConfig

_SAVE_FIELD = "kvshare_save"
"""The field of a request's `kv_transfer_params`."""


def is_for_decode(request: "Request") -> bool:
    """Whether another engine goes on with this prompt: one that is told of it, and waits.

    Coordinators other than our router may say so in words of vLLM's.
    """
    params: Any = request.kv_transfer_params
    is_said = isinstance(params, dict) and params.get("do_remote_decode") is True
    return is_said or is_for_another_engine(request)


@dataclass(frozen=True, slots=True)
class Limit:
    """Chunks that end after the first `end_tokens` tokens of a request are not stored."""

    end_tokens: int = sys.maxsize
    rule: str = ""
    """What says so: an option, or `request`; empty: there is no limit."""


class SavePolicy:
    """Finds the limit of each request. Ownership: vLLM's scheduler thread."""

    def __init__(self, config: "KVConfig", hash_function: HashFunction) -> None:
        """`hash_function`: vLLM's own, for the names of tails."""
        self._save_after = config.save_after
        self._save_min_tokens = config.save_min_tokens
        self._saves_answers = config.save_answers
        self._hash_function = hash_function
        self._sightings = Sightings() if config.save_after > 1 else None

    def limit_of(self, request: "Request", grid: Grid) -> Limit:
        """Return up to where `request` is stored. To be called once for each prompt, since it
        counts as a sighting. O(chunks), and 2 us for each."""
        asked = requested_save(request, request.kv_transfer_params, _SAVE_FIELD)
        if asked is False:
            return Limit(0, "request")
        if not (asked or is_for_decode(request)):
            if stored_tokens(request, grid) < self._save_min_tokens:
                return Limit(0, "save_min_tokens")
            end_tokens = self._often_seen(request, grid)
            if end_tokens < stored_tokens(request, grid):
                return Limit(end_tokens, "save_after")
        if not self._saves_answers:
            return Limit(request.num_prompt_tokens, "save_answers")
        return Limit()

    def _often_seen(self, request: "Request", grid: Grid) -> int:
        """Return up to which token all chunks of the prompt were seen often enough."""
        if self._sightings is None:
            return request.num_prompt_tokens
        end_tokens, is_often = 0, True
        for chunk in prompt_chunks(request, grid, self._hash_function):
            # Each is counted: a later prompt may differ from this one after any of them.
            is_often = self._sightings.add(chunk.key) >= self._save_after and is_often
            if is_often:
                end_tokens = chunk.end_tokens
        return end_tokens
