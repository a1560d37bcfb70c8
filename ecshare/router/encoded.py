# SPDX-License-Identifier: Apache-2.0
"""What E has reported of media, so that it is asked once for each."""

from collections.abc import Awaitable, Callable, Iterable, Mapping

import msgspec
from msgspec import Struct

from ecshare.router.bounded_cache import BoundedCache
from ecshare.router.concurrent import gather_all
from ecshare.router.plan import Metadata
from ecshare.router.single_flight import SingleFlight

_MAX_ENTRIES = 1_000_000
_ENTRY_BYTES = 500
"""Memory of one entry besides its JSON, roughly."""

Ask = Callable[[], Awaitable[Metadata | None]]


class Reports(Struct, frozen=True):
    """What is known of the items of one request."""

    metadata: dict[str, Metadata | None]
    """By uuid; None: the item must be sent whole."""
    known: frozenset[str]
    """The uuids that E was not asked for: the embedding may be gone meanwhile."""


class EncodedMedia:
    """A bounded index of E's reports, shared by all requests. Belongs to the event loop's thread.

    A key stands for all that a report depends on. Reports are not checked here: they are E's own.
    """

    def __init__(self, max_bytes: int, patience_s: float) -> None:
        """`patience_s`: how long a request waits for E's answer to another one at most."""
        self._index: BoundedCache[bytes, bytes] = BoundedCache(_MAX_ENTRIES, max_bytes)
        self._asking: SingleFlight[bytes, Metadata | None] = SingleFlight()
        self._patience_s = patience_s
        self._num_asked = 0
        self._num_avoided = 0

    async def reports(self, keys: Mapping[str, bytes], asks: Mapping[str, Ask]) -> Reports:
        """Return the reports of items, by uuid: from the index, else from E.

        `keys` and `asks` have the same uuids. An ask sends one item to E. Items that other requests
        are asking for now are waited for.

        Raises:
            Exception: what an ask raises; the others are cancelled.
        """
        known = self.known(keys)
        unknown = [uuid for uuid in keys if uuid not in known]
        answers = await gather_all([self._report(keys[uuid], asks[uuid]) for uuid in unknown])
        self._num_avoided += len(known)
        metadata = {**known, **dict(zip(unknown, answers, strict=True))}
        return Reports(metadata, frozenset(known))

    def known(self, keys: Mapping[str, bytes]) -> dict[str, Metadata]:
        """Return the reports that are in the index, by uuid."""
        found = {uuid: self._index.get(key) for uuid, key in keys.items()}
        return {uuid: msgspec.json.decode(json) for uuid, json in found.items() if json is not None}

    def forget(self, keys: Iterable[bytes]) -> None:
        """Have E asked for these again."""
        for key in keys:
            self._index.discard(key)

    def status(self) -> dict[str, int]:
        """Return counts for the status page."""
        return {
            "asked": self._num_asked,
            "avoided": self._num_avoided,
            "waiting": self._asking.num_waiting,
            "remembered": len(self._index),
            "memory": self._index.num_bytes,
        }

    async def _report(self, key: bytes, ask: Ask) -> Metadata | None:
        has_asked = False

        async def asked() -> Metadata | None:
            nonlocal has_asked
            has_asked = True
            self._num_asked += 1
            metadata = await ask()
            if metadata is not None:  # else nobody knows whether it is stored
                json = msgspec.json.encode(metadata)
                self._index.put(key, json, len(json) + _ENTRY_BYTES)
            return metadata

        metadata = await self._asking.run(key, asked, self._patience_s)
        self._num_avoided += not has_asked
        return metadata
