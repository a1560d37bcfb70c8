# SPDX-License-Identifier: Apache-2.0
"""Looks up the names of hosts that clients name.

The system's resolver holds a thread until its name servers have answered or it gives up, ten
seconds or more, whether or not anybody still waits. A client that names hosts whose servers are
silent would so stop all who need one of these threads. c-ares asks for all names in one thread.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress

import pycares
from aiohttp.abc import AbstractResolver, ResolveResult

from ecshare.router.media.places import Places

_LIMIT_S = 5.0
_FIRST_TRY_S = 0.7
_TRIES = 3
"""Each waits twice as long as the one before: c-ares asks on for no longer than we wait."""
_MAX_AGE_S = 30.0
_MAX_LOOKUPS = 10_000
_Found = pycares.AddrInfoResult


class MediaNames(AbstractResolver):
    """The resolver of the client that fetches media. Belongs to the event loop's thread.

    It reads /etc/hosts and asks the name servers of /etc/resolv.conf. It knows no other sources
    of /etc/nsswitch.conf. Answers are kept as long as they say, but for half a minute at most.
    """

    def __init__(self, places: Places, servers: Sequence[str] = ()) -> None:
        """`places`: for look-ups under way. `servers`: other name servers, as host:port."""
        self._places = places
        self._servers = servers
        self._channel: pycares.Channel | None = None
        self._old_at_s = 0.0
        self._num_left = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host.

        Raises:
            FullError: too many look-ups are under way.
            OSError: there is no answer within five seconds, or no address.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Found] = loop.create_future()
        zone = ".".join(host.rstrip(".").lower().rsplit(".", 2)[-2:])
        self._places.take(zone)

        def end(found: _Found | None, error: int | None) -> None:
            self._places.free(zone)  # not when we stop waiting: the question is still asked
            if answer.done():
                return
            if found is None or error is not None:
                reason = "no answer" if error is None else pycares.errno.strerror(error)
                answer.set_exception(OSError(None, str(reason)))
            else:
                answer.set_result(found)

        def ended(found: _Found | None, error: int | None) -> None:
            """Called by a thread of c-ares, perhaps when the loop has ended."""
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(end, found, error)

        try:
            self._open(loop.time()).getaddrinfo(
                host, port, family=family, type=socket.SOCK_STREAM, callback=ended
            )
        except (ValueError, TypeError, pycares.AresError) as exc:  # the name is none
            self._places.free(zone)
            raise OSError(None, str(exc)) from exc
        async with asyncio.timeout(_LIMIT_S):
            found = await answer
        if not found.nodes:
            raise OSError(None, "the name has no address")
        return [
            ResolveResult(
                hostname=host,
                host=node.addr[0].decode(),
                port=port,
                family=node.family,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for node in found.nodes
        ]

    async def close(self) -> None:
        """End all look-ups."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _open(self, now_s: float) -> pycares.Channel:
        """Return the channel to ask by, a new one now and then.

        c-ares keeps answers for up to an hour, however many, and also that there are none. A
        channel that is replaced lives until its last look-up has ended.

        Raises:
            AresError: none can be made.
        """
        if self._channel is None or self._num_left <= 0 or now_s >= self._old_at_s:
            self._channel = pycares.Channel(
                timeout=_FIRST_TRY_S, tries=_TRIES, servers=self._servers or None
            )
            self._old_at_s = now_s + _MAX_AGE_S
            self._num_left = _MAX_LOOKUPS
        self._num_left -= 1
        return self._channel
