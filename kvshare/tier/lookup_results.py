# SPDX-License-Identifier: Apache-2.0
"""What requests were told of the chunks they asked for. Pure: no I/O, no store."""

from collections.abc import Iterable

from vllm.v1.kv_offload.base import LookupResult, OffloadKey


class LookupResults:
    """The answer to each request for each chunk; RETRY until there is one.

    Several requests that ask for a chunk at one time wait for one question to the store. A request
    keeps its answer for life, or vLLM would never come to an end with it; whoever comes later asks
    anew, for the chunk may have been stored meanwhile. Bounded by the requests that live.

    Ownership: the scheduler thread.
    """

    def __init__(self) -> None:
        self._of_key: dict[OffloadKey, dict[str, LookupResult]] = {}
        self._of_request: dict[str, list[OffloadKey]] = {}
        self._asked: set[OffloadKey] = set()  # not answered yet
        self._unsent: dict[str, list[OffloadKey]] = {}

    def verdict(self, key: OffloadKey, request_id: str) -> LookupResult:
        """Return what the request is told now. O(1)."""
        told = self._of_key.setdefault(key, {})
        if request_id in told:
            return told[request_id]
        told[request_id] = LookupResult.RETRY
        self._of_request.setdefault(request_id, []).append(key)
        if key not in self._asked:
            self._asked.add(key)
            self._unsent.setdefault(request_id, []).append(key)
        return LookupResult.RETRY

    def take_questions(self) -> list[tuple[OffloadKey, ...]]:
        """Return what is to be asked of the store, by request, each chunk once."""
        unsent, self._unsent = self._unsent, {}
        return [tuple(keys) for keys in unsent.values()]

    def answer(self, key: OffloadKey, *, is_there: bool) -> None:
        """Tell all who wait for it whether the chunk is there."""
        self._asked.discard(key)
        told = self._of_key.get(key, {})
        for request_id, verdict in told.items():
            if verdict is LookupResult.RETRY:
                told[request_id] = LookupResult.HIT if is_there else LookupResult.MISS

    def lost(self, keys: Iterable[OffloadKey]) -> None:
        """Tell all who were told of these chunks that they cannot be had after all."""
        for key in keys:
            told = self._of_key.get(key, {})
            told.update(dict.fromkeys(told, LookupResult.MISS))

    def forget(self, request_id: str) -> None:
        """Let go of the request; once is enough."""
        for key in self._of_request.pop(request_id, ()):
            told = self._of_key[key]
            del told[request_id]
            if not told:
                del self._of_key[key]
