# SPDX-License-Identifier: Apache-2.0
"""Which hosts media may be fetched from, and the look-up of their names.

The system's resolver holds a thread until its name servers have answered or it gives up, ten
seconds or more, whether or not anybody still waits. A client that names hosts whose servers are
silent would so stop all who need one of these threads. c-ares asks for all names in one thread.
"""

import asyncio
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import pycares
from aiohttp.abc import AbstractResolver, ResolveResult

from ecshare.router.media.places import Places
from ecshare.router.options.values import Network

# --- addresses ---

_NAT64 = IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_OF_CLOUDS = IPv4Network("168.63.129.16/32"), IPv4Network("192.0.0.0/24")
"""Answered within a cloud alone, although Python calls them global: the agent of Azure's hosts, and
protocol assignments, where Oracle had its metadata."""
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")


def may_connect(text: str, allowed: Iterable[Network]) -> bool:
    """Tell whether an address is public or in one of the allowed networks.

    `text` is a numeric address as sockets report it. Anything else is refused, including other
    spellings of an address, such as 127.1.
    """
    try:
        address = _target(ip_address(text))
    except ValueError:
        return False
    return _is_public(address) or any(address in network for network in allowed)


def is_name(host: str) -> bool:
    """Tell whether a host is a name; else it is an address, in this spelling or another one."""
    last = host.rstrip(".").rpartition(".")[2]
    return ":" not in host and not _NUMBER.fullmatch(last)


def _target(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return the IPv4 address that an IPv6 address translates or tunnels to, else the address."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    # is_global is true for multicast and, in some Python versions, for unassigned IPv6 ranges.
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, IPv6Address):
        return address in _GLOBAL_UNICAST
    return not any(address in network for network in _OF_CLOUDS)


# --- look-ups ---

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
