# SPDX-License-Identifier: Apache-2.0
"""What E has reported of media, so that it is asked once for each."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import msgspec
from msgspec import Struct

from ecshare.router.api.errors import EngineError
from ecshare.router.reuse import BoundedCache, SingleFlight
from ecshare.router.siblings import Siblings
from ecshare.router.stages.plan import Metadata
from ecshare.store.threads import gather_all

_TOPIC = "encoded"
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
    was_asked: bool
    """Whether E was asked for one now, by this request or by one that it waited for."""


class EncodedMedia:
    """A bounded index of E's reports, shared by all requests. Belongs to the event loop's thread.

    A key stands for all that a report depends on.
    """

    def __init__(self, max_bytes: int, patience_s: float, siblings: Siblings) -> None:
        """`patience_s`: how long a request waits for E's answer to another one at most."""
        self._siblings = siblings
        siblings.hear(_TOPIC, self._hear)
        self._index: BoundedCache[bytes, bytes] = BoundedCache(_MAX_ENTRIES, max_bytes)
        self._asking: SingleFlight[bytes, tuple[Metadata | None, bool]] = SingleFlight()
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
        found = dict(zip(unknown, answers, strict=True))
        metadata = {**known, **{uuid: report for uuid, (report, _) in found.items()}}
        shared = [uuid for uuid, (_, is_shared) in found.items() if is_shared]
        return Reports(metadata, frozenset(known).union(shared), len(shared) < len(found))

    def knows(self, key: bytes) -> bool:
        """Tell whether the report under a key is in the index."""
        return self._index.get(key) is not None

    def avoided(self, known: dict[str, Metadata]) -> Reports:
        """Return what was found by `known`, and count it: E need not be asked for any of it."""
        self._num_avoided += len(known)
        return Reports({**known}, frozenset(known), was_asked=False)

    def known(self, keys: Mapping[str, bytes]) -> dict[str, Metadata]:
        """Return the reports that are in the index, by uuid."""
        found = {uuid: self._index.get(key) for uuid, key in keys.items()}
        return {uuid: msgspec.json.decode(json) for uuid, json in found.items() if json is not None}

    @contextmanager
    def doubted(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Have E asked for these in the block. If an engine fails in the block, what E has not
        reported again is as known as it was before.
        """
        known = {key: self._index.get(key) for key in keys}
        for key in known:
            self._index.discard(key)
            self._siblings.tell(_TOPIC, key, None)
        try:
            yield
        except EngineError:
            for key, json in known.items():
                if json is not None and key not in self._index:
                    self._put(key, json)
            raise

    def status(self) -> dict[str, int]:
        """Return counts for the status page."""
        return {
            "asked": self._num_asked,
            "avoided": self._num_avoided,
            "waiting": self._asking.num_waiting,
            "remembered": len(self._index),
            "memory": self._index.num_bytes,
            "evicted": self._index.num_evicted,
        }

    def _put(self, key: bytes, json: bytes) -> None:
        self._hear(key, json)
        self._siblings.tell(_TOPIC, key, json)

    def _hear(self, key: bytes, json: bytes | None) -> None:
        if json is None:
            self._index.discard(key)
        else:
            self._index.put(key, json, len(json) + _ENTRY_BYTES)

    async def _report(self, key: bytes, ask: Ask) -> tuple[Metadata | None, bool]:
        """Return a report that was not in the index, and whether E was not asked for it here."""
        has_asked = False

        async def found() -> tuple[Metadata | None, bool]:
            nonlocal has_asked
            # Another request's report may have come since this one looked.
            if (json := self._index.get(key)) is not None:
                return msgspec.json.decode(json), True
            has_asked = True
            self._num_asked += 1
            metadata = await ask()
            if metadata is not None:  # else nobody knows whether it is stored
                self._put(key, msgspec.json.encode(metadata))
            return metadata, False

        report = await self._asking.run(key, found, self._patience_s)
        self._num_avoided += not has_asked
        return report
