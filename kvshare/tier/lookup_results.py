# SPDX-License-Identifier: Apache-2.0
"""Look-up results by chunk and request. Pure: no I/O, no store."""

from collections.abc import Iterable

from vllm.v1.kv_offload.base import LookupResult, OffloadKey


class LookupResults:
    """The look-up result of each chunk for each request; RETRY until the store has answered.

    Requests that look up a chunk at the same time share one query to the store. The result is final
    for these requests, because vLLM would otherwise never finish a look-up; only `lost` changes it.
    Later requests cause a new query, as the chunk may have been stored meanwhile. The size is
    bounded by the live requests.

    Ownership: the scheduler thread.
    """

    def __init__(self) -> None:
        self._of_key: dict[OffloadKey, dict[str, LookupResult]] = {}
        self._of_request: dict[str, list[OffloadKey]] = {}
        self._asked: set[OffloadKey] = set()  # queries in progress
        self._unsent: dict[str, list[OffloadKey]] = {}

    def result(self, key: OffloadKey, request_id: str) -> LookupResult:
        """Return the current result for a request. The first call for a chunk queues a query."""
        results = self._of_key.setdefault(key, {})
        if request_id in results:
            return results[request_id]
        results[request_id] = LookupResult.RETRY
        self._of_request.setdefault(request_id, []).append(key)
        if key not in self._asked:
            self._asked.add(key)
            self._unsent.setdefault(request_id, []).append(key)
        return LookupResult.RETRY

    def take_queries(self) -> list[tuple[OffloadKey, ...]]:
        """Return and clear the queued queries: chunks grouped by request, each chunk once."""
        unsent, self._unsent = self._unsent, {}
        return [tuple(keys) for keys in unsent.values()]

    def answer(self, key: OffloadKey, *, is_stored: bool) -> None:
        """Record the store's answer for all requests that wait for the chunk."""
        self._asked.discard(key)
        results = self._of_key.get(key, {})
        for request_id, result in results.items():
            if result is LookupResult.RETRY:
                results[request_id] = LookupResult.HIT if is_stored else LookupResult.MISS

    def lost(self, keys: Iterable[OffloadKey]) -> None:
        """Change the results of these chunks to MISS: they cannot be loaded after all."""
        for key in keys:
            results = self._of_key.get(key, {})
            results.update(dict.fromkeys(results, LookupResult.MISS))

    def remove_request(self, request_id: str) -> None:
        """Remove the results of a request. Call once."""
        for key in self._of_request.pop(request_id, ()):
            results = self._of_key[key]
            del results[request_id]
            if not results:
                del self._of_key[key]
