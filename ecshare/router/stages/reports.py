# SPDX-License-Identifier: Apache-2.0
"""What engines have reported to be stored, remembered by all workers of the router."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from ecshare.router.reuse import BoundedCache
from ecshare.router.siblings import Siblings

ON_ITS_WAY_S = 10.0
"""So long after an engine's report what it tells of may be on its way. Later it is stored, or
lost."""
KEPT_S = 3600.0
"""An engine is asked again after so long: the store may have lost what it has reported."""
_MAX_ENTRIES = 1_000_000

V = TypeVar("V")


class ReportIndex(BoundedCache[bytes, V]):
    """A bounded index of reports, by digest. Belongs to the event loop's thread."""

    def __init__(
        self,
        topic: str,
        kind: type[V],
        size_of: Callable[[V], int],
        max_bytes: int,
        siblings: Siblings,
    ) -> None:
        """`topic`: what siblings call it. `kind`: of a report, for msgpack. `size_of`: returns how
        much memory one takes, about."""
        super().__init__(_MAX_ENTRIES, max_bytes)
        self._topic = topic
        self._kind = kind
        self._size_of = size_of
        self._siblings = siblings
        siblings.hear(topic, self._hear)

    def remember(self, key: bytes, report: V) -> None:
        """Keep a report, in place of a former one, and tell the siblings."""
        self.put(key, report, self._size_of(report))
        if self._siblings.are_there:
            self._siblings.tell(self._topic, key, msgspec.msgpack.encode(report))

    def forget(self, key: bytes) -> None:
        """Forget a report, if there is one, and tell the siblings."""
        self.discard(key)
        self._siblings.tell(self._topic, key, None)

    def status(self) -> dict[str, int]:
        """Return counts for the status page."""
        return {
            "remembered": len(self),
            "memory": self.num_bytes,
            "evicted": self.num_evicted,
        }

    def _hear(self, key: bytes, told: bytes | None) -> None:
        if told is None:
            self.discard(key)
        else:
            report = msgspec.msgpack.decode(told, type=self._kind)
            self.put(key, report, self._size_of(report))
