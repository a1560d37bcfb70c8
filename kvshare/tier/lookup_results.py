# SPDX-License-Identifier: Apache-2.0
"""What requests were told of the chunks they asked for. Pure: no I/O, no store."""

from collections.abc import Iterable

from vllm.v1.kv_offload.base import LookupResult, OffloadKey


class LookupResults:
    """The answer to each request for each chunk; RETRY until there is one.

    Requests that ask for a chunk at the same time share one query to the store. A request keeps its
    answer for life, because vLLM would otherwise never finish its look-up. Later requests query
    again, as the chunk may have been stored meanwhile. The size is bounded by the live requests.

    Ownership: the scheduler thread.
    """

    def __init__(self) -> None:
        self._of_key: dict[OffloadKey, dict[str, LookupResult]] = {}
        self._of_request: dict[str, list[OffloadKey]] = {}
        # Not answered yet, and for which requests the store was asked. Others came later.
        self._asked: dict[OffloadKey, set[str]] = {}
        self._unsent: dict[str, list[OffloadKey]] = {}

    def result(self, key: OffloadKey, request_id: str) -> LookupResult:
        """Return the present answer for a request. O(1)."""
        results = self._of_key.setdefault(key, {})
        if request_id in results:
            return results[request_id]
        results[request_id] = LookupResult.RETRY
        self._of_request.setdefault(request_id, []).append(key)
        if key not in self._asked:
            self._asked[key] = {request_id}
            self._unsent.setdefault(request_id, []).append(key)
        return LookupResult.RETRY

    def take_questions(self) -> list[tuple[OffloadKey, ...]]:
        """Return the chunks to query from the store, grouped by request, each chunk once."""
        unsent, self._unsent = self._unsent, {}
        return [tuple(keys) for keys in unsent.values()]

    def answer(self, key: OffloadKey, *, is_there: bool) -> None:
        """Give the answer to all requests that wait for the chunk."""
        self._asked.pop(key, None)
        results = self._of_key.get(key, {})
        for request_id, result in results.items():
            if result is LookupResult.RETRY:
                results[request_id] = LookupResult.HIT if is_there else LookupResult.MISS

    def late(self, key: OffloadKey) -> None:
        """Take note that the store has not answered in time: the requests for which it was asked
        miss the chunk. For those that came later it is asked again, once."""
        results, asked = self._of_key.get(key, {}), self._asked.pop(key, set())
        results.update(dict.fromkeys(asked & results.keys(), LookupResult.MISS))
        waiting = {name for name, result in results.items() if result is LookupResult.RETRY}
        if waiting:
            self._asked[key] = waiting
            self._unsent.setdefault(min(waiting), []).append(key)

    def lost(self, keys: Iterable[OffloadKey]) -> None:
        """Change the answers for these chunks to MISS: they cannot be loaded after all."""
        for key in keys:
            results = self._of_key.get(key, {})
            results.update(dict.fromkeys(results, LookupResult.MISS))

    def forget(self, request_id: str) -> None:
        """Drop the request. Call once."""
        for key in self._of_request.pop(request_id, ()):
            results = self._of_key[key]
            del results[request_id]
            if not results:
                del self._of_key[key]
