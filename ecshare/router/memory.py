# SPDX-License-Identifier: Apache-2.0
"""What all requests in flight may hold in memory together. Pure."""

from collections.abc import Iterator
from contextlib import contextmanager

from ecshare.router.errors import ApiError

_RETRY_AFTER_S = 2.0


class Memory:
    """A limit on bytes that requests share. Belongs to the event loop's thread."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0

    @contextmanager
    def share(self) -> Iterator["Share"]:
        """Yield one request's part, which is given back when the block ends."""
        share = Share(self)
        try:
            yield share
        finally:
            self.used_bytes -= share.held_bytes

    def has_room(self, more_bytes: int, held_bytes: int) -> bool:
        """Tell whether there is room for more; whoever holds everything alone always finds it."""
        return self.used_bytes == held_bytes or self.used_bytes + more_bytes <= self._limit_bytes


class Share:
    """What one request holds of the memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.held_bytes = 0

    def expect(self, num_bytes: int) -> None:
        """Raise ApiError 429 if so much more would not fit now. Takes nothing yet."""
        if not self._memory.has_room(num_bytes, self.held_bytes):
            raise ApiError(
                429,
                "The requests in flight take all the memory there is for them.",
                code="too_many_requests",
                retry_after_s=_RETRY_AFTER_S,
            )

    def take(self, num_bytes: int) -> None:
        """Take so much more; raises ApiError 429 where that is too much."""
        self.expect(num_bytes)
        self.held_bytes += num_bytes
        self._memory.used_bytes += num_bytes
