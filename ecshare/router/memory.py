# SPDX-License-Identifier: Apache-2.0
"""The memory limit that all requests in flight share. Pure."""

from collections.abc import Iterator
from contextlib import contextmanager

from ecshare.router.errors import ApiError

_RETRY_AFTER_S = 2.0
_SMALL_BYTES = 1024 * 1024
_SHARE_FOR_SMALL = 8


class MemoryBudget:
    """A limit in bytes that requests share. Belongs to the event loop's thread.

    An eighth of it is for small requests alone, of up to 1 MiB: a few clients with large bodies,
    which they may send as slowly as they are allowed to, cannot keep all others out.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    @contextmanager
    def reservation(self) -> Iterator["Reservation"]:
        """Yield an empty reservation for one request. It is released when the block ends."""
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            self.used_bytes -= reservation.held_bytes

    def has_room(self, more_bytes: int, held_bytes: int) -> bool:
        """Tell whether `more_bytes` fit. They always do if the request already holds all that is
        used.
        """
        limit_bytes = self.limit_bytes
        if held_bytes + more_bytes > _SMALL_BYTES:
            limit_bytes -= self.limit_bytes // _SHARE_FOR_SMALL
        return self.used_bytes == held_bytes or self.used_bytes + more_bytes <= limit_bytes


class Reservation:
    """The memory that one request has reserved."""

    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self.held_bytes = 0

    def expect(self, num_bytes: int) -> None:
        """Check that so much more would fit now. Reserves nothing.

        Raises:
            ApiError: it would not fit (429).
        """
        if not self._memory.has_room(num_bytes, self.held_bytes):
            raise ApiError(
                429,
                "The requests in flight take all the memory there is for them.",
                code="too_many_requests",
                retry_after_s=_RETRY_AFTER_S,
            )

    def keep(self, num_bytes: int) -> None:
        """Release all but `num_bytes` of what is reserved."""
        released = max(0, self.held_bytes - num_bytes)
        self.held_bytes -= released
        self._memory.used_bytes -= released

    def take(self, num_bytes: int) -> None:
        """Reserve so much more.

        Raises:
            ApiError: it does not fit (429).
        """
        self.expect(num_bytes)
        self.held_bytes += num_bytes
        self._memory.used_bytes += num_bytes
