# SPDX-License-Identifier: Apache-2.0
"""Looks up the names of hosts that clients name.

The system's resolver holds a thread until its name servers have answered or it gives up, ten
seconds or more, whether or not anybody still waits. A client that names hosts whose servers are
silent would so stop all who need one of these threads. c-ares asks without threads.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from functools import partial

import pycares
from aiohttp.abc import AbstractResolver, ResolveResult

from ecshare.router.media.places import Places

_LIMIT_S = 5.0
_FIRST_TRY_S = 0.7
_TRIES = 3
"""Each waits twice as long as the one before: c-ares asks on for no longer than we wait."""
_TICK_S = 0.25
_MAX_AGE_S = 30.0
_MAX_LOOKUPS = 10_000
_Found = pycares.AddrInfoResult
_Ended = Callable[[_Found | None, int | None], None]


class MediaNames(AbstractResolver):
    """The resolver of the client that fetches media. Belongs to the event loop's thread.

    It reads /etc/hosts and asks the name servers of /etc/resolv.conf. It knows no other sources
    of /etc/nsswitch.conf. Answers are kept as long as they say, but for half a minute at most.
    """

    def __init__(self, places: Places, servers: Sequence[str] = ()) -> None:
        """`places`: for look-ups under way. `servers`: other name servers, as host:port."""
        self._places = places
        self._servers = tuple(servers)
        self._channel: _Channel | None = None

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host.

        Raises:
            FullError: too many look-ups are under way.
            OSError: there is no answer within five seconds, or no address.
        """
        answer: asyncio.Future[_Found] = asyncio.get_running_loop().create_future()
        zone = ".".join(host.rstrip(".").lower().rsplit(".", 2)[-2:])
        self._places.take(zone)

        def ended(found: _Found | None, error: int | None) -> None:
            self._places.free(zone)  # not when we stop waiting: the question is still asked
            if answer.done():
                return
            if found is None or error is not None:
                answer.set_exception(OSError(None, _reason(error)))
            else:
                answer.set_result(found)

        try:
            self._open().look_up(host, port, family, ended)
        except BaseException:
            self._places.free(zone)
            raise
        async with asyncio.timeout(_LIMIT_S):
            found = await answer
        results = [_result(host, port, node) for node in found.nodes]
        if not results:
            raise OSError(None, "the name has no address")
        return results

    async def close(self) -> None:
        """End all look-ups."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _open(self) -> "_Channel":
        """Return the channel to ask by, a new one now and then.

        c-ares keeps answers for up to an hour, however many, and also that there are none.

        Raises:
            OSError: none can be made.
        """
        if self._channel is not None and self._channel.is_old():
            self._channel.retire()
            self._channel = None
        if self._channel is None:
            try:
                self._channel = _Channel(self._servers)
            except pycares.AresError as exc:
                raise OSError(None, str(exc)) from exc
        return self._channel


class _Channel:
    """A c-ares channel that the event loop drives."""

    def __init__(self, servers: tuple[str, ...]) -> None:
        """
        Raises:
            pycares.AresError: it cannot be made.
        """
        self._loop = asyncio.get_running_loop()
        self._old_at_s = self._loop.time() + _MAX_AGE_S
        self._left = _MAX_LOOKUPS
        self._num_pending = 0
        self._is_retired = False
        self._is_closed = False
        self._reading: set[int] = set()
        self._writing: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._channel = pycares.Channel(
            timeout=_FIRST_TRY_S,
            tries=_TRIES,
            servers=servers or None,
            sock_state_cb=self._watch,
        )

    def is_old(self) -> bool:
        """Tell whether the channel has kept answers for long enough, or enough of them."""
        return self._left <= 0 or self._loop.time() >= self._old_at_s

    def look_up(self, host: str, port: int, family: int, ended: _Ended) -> None:
        """Ask for the addresses of a host. `ended` is called once, perhaps at once.

        Raises:
            OSError: the name is none.
        """
        self._left -= 1
        self._num_pending += 1
        try:
            self._channel.getaddrinfo(
                host,
                port,
                family=socket.AddressFamily(family),
                type=socket.SOCK_STREAM,
                callback=partial(self._ended, ended),
            )
        except (ValueError, TypeError, pycares.AresError) as exc:
            self._num_pending -= 1
            raise OSError(None, str(exc)) from exc
        self._wait()

    def retire(self) -> None:
        """Close the channel when its last look-up has ended."""
        self._is_retired = True
        if not self._num_pending:
            self.close()

    def close(self) -> None:
        """Close the channel now. Nobody hears of its look-ups any more."""
        if self._is_closed:
            return
        self._is_closed = True
        for fd in self._reading:
            self._loop.remove_reader(fd)
        for fd in self._writing:
            self._loop.remove_writer(fd)
        if self._timer is not None:
            self._timer.cancel()
        self._channel.close()

    def _ended(self, ended: _Ended, found: _Found | None, error: int | None) -> None:
        if self._is_closed:  # then in a thread of pycares
            return
        self._num_pending -= 1
        if self._is_retired and not self._num_pending:
            self._loop.call_soon(self.close)  # c-ares is in the middle of something
        ended(found, error)

    def _watch(self, fd: int, is_readable: bool, is_writable: bool) -> None:  # noqa: FBT001
        """Have the event loop tell what happens at a socket, or no longer."""
        if self._is_closed:
            return
        if is_readable:
            self._reading.add(fd)
            self._loop.add_reader(fd, self._channel.process_read_fd, fd)
        elif fd in self._reading:
            self._reading.discard(fd)
            self._loop.remove_reader(fd)
        if is_writable:
            self._writing.add(fd)
            self._loop.add_writer(fd, self._channel.process_write_fd, fd)
        elif fd in self._writing:
            self._writing.discard(fd)
            self._loop.remove_writer(fd)

    def _wait(self) -> None:
        """Have questions repeated and given up in time."""
        if self._timer is None and self._num_pending and not self._is_closed:
            self._timer = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        nothing = pycares.ARES_SOCKET_BAD
        self._channel.process_fd(nothing, nothing)
        self._wait()


def _reason(error: int | None) -> str:
    return "no answer" if error is None else str(pycares.errno.strerror(error))


def _result(host: str, port: int, node: pycares.AddrInfoNode) -> ResolveResult:
    return ResolveResult(
        hostname=host,
        host=node.addr[0].decode(),
        port=port,
        family=node.family,
        proto=0,
        flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
    )
