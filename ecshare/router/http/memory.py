# SPDX-License-Identifier: Apache-2.0
"""The memory limit that all requests in flight share. Pure."""

from ecshare.router.api.errors import ApiError

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

    def reservation(self) -> "Reservation":
        """Return an empty reservation for one request, to be released by it."""
        return Reservation(self)


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
        memory = self._memory
        limit_bytes = memory.limit_bytes
        if self.held_bytes + num_bytes > _SMALL_BYTES:
            limit_bytes -= limit_bytes // _SHARE_FOR_SMALL
        # It always fits if this request holds all that is used: a limit that is too low for one
        # request serves it all the same.
        if memory.used_bytes != self.held_bytes and memory.used_bytes + num_bytes > limit_bytes:
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

    def release(self) -> None:
        """Release all."""
        self.keep(0)

    def take(self, num_bytes: int) -> None:
        """Reserve so much more.

        Raises:
            ApiError: it does not fit (429).
        """
        self.expect(num_bytes)
        self.held_bytes += num_bytes
        self._memory.used_bytes += num_bytes
