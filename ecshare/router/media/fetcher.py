# SPDX-License-Identifier: Apache-2.0
"""Fetches what is at urls that clients name, from allowed addresses only.

It can what vLLM's own fetch can. A client that names slow, silent or hostile servers harms nobody
but itself: the downloads and look-ups under way are bounded for each request, for each host and in
all, none of them holds a thread, and slow downloads end when others need their places.
"""

import asyncio
import base64
import errno
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import NamedTuple
from urllib.request import getproxies, proxy_bypass

import aiohttp
import pybase64
from aiohttp import hdrs
from msgspec import Struct
from yarl import URL

from ecshare import __version__
from ecshare.router.api.client_request import MediaItem
from ecshare.router.api.errors import ApiError
from ecshare.router.http.bodies import Reservation
from ecshare.router.media.hosts import MediaNames, is_name, may_connect
from ecshare.router.media.places import FullError, Place, Places, Turns
from ecshare.router.options.config import RouterConfig

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
_USER_AGENT = f"ecshare/{__version__} (+https://github.com/ecshare/ecshare)"
_MAX_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)
_NOT_MODIFIED = 304
_PASSING = (407, 408, 425, 429)
"""Statuses below 500 that another try may change. 407 is the operator's proxy."""
_UNPACKED = ("", "identity", "gzip", "deflate", "br", "zstd")
_RETRY_AFTER_S = 2.0
_KEEP_IDLE_S = 2.0
"""Idle connections are not counted: they must be fewer than those that are."""
_BYTES_A_TURN = 256 * 1024
"""How much is unpacked and encoded before others have their turn."""
_MAX_LOGGED_CHARS = 300
_MAX_ETAG_CHARS = 256
_NOT_PUBLIC = "its address is not public"
_HINT = "--allow-media-network allows others"


class _ForbiddenAddressError(OSError):
    """Media resolve to an address that is neither public nor allowed."""

    def __init__(self) -> None:
        super().__init__(errno.EACCES, f"no public address; {_HINT}")


class Fetched(Struct, frozen=True):
    """The bytes at a url, as base64 text, None if they have not changed."""

    text: bytearray | None
    etag: str
    """The url's own strong validator, empty if it has none."""


class Fetcher:
    """The HTTP client for media. Create and close it inside the event loop."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._places = Places(config.max_connections)
        self._names = MediaNames(Places(config.max_connections))
        self._proxies = Proxies()
        self._session = _session(
            aiohttp.TCPConnector(
                limit=0,  # the places are the limit
                keepalive_timeout=_KEEP_IDLE_S,
                resolver=self._names,
                socket_factory=self._allowed_socket,
            )
        )
        # Connects to the operator's proxies alone, which are seldom public.
        self._to_proxies = _session(aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S))
        self.num_refused = 0
        """Downloads for which there was no place."""

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()
        await self._to_proxies.close()
        await self._names.close()

    def turns(self) -> Turns:
        """Return what a request takes turns by."""
        return Turns(self._places)

    async def fetch(self, item: MediaItem, budget: "Budget", etag: str) -> Fetched:
        """Fetch an item at a url, unless its server says that it is what `etag` stands for. Its
        bytes are taken from `budget`.

        Raises:
            ApiError: it cannot be had; names the item.
        """
        time_limit = asyncio.timeout(self._config.media_timeout_s)
        try:
            async with time_limit:
                with Place(self._places, partial(_expire, time_limit)) as place:
                    return await self._follow(item, budget, etag, place)
        except FullError as exc:
            self.num_refused += 1
            raise _too_many(item) from exc
        except ValueError as exc:  # also aiohttp.InvalidURL
            raise _lasting(item, repr(exc)) from exc
        except (aiohttp.ClientError, OSError) as exc:  # with time-outs
            if place.was_given_up:
                raise _passing(item, "it was slow, and others needed its place") from exc
            is_clear = isinstance(exc, aiohttp.ClientConnectorError | _ForbiddenAddressError)
            reason = f"{type(exc).__name__}: {exc}" if is_clear else repr(exc)
            raise _passing(item, reason) from exc

    async def _follow(self, item: MediaItem, budget: "Budget", etag: str, place: Place) -> Fetched:
        url = self._media_url(item)
        # A validator is of one resource: that of this url, and of no other that it leads to.
        condition: dict[str, str] = {hdrs.IF_NONE_MATCH: etag} if etag else {}
        for num_redirects in range(_MAX_REDIRECTS + 1):
            place.take(url.host or "")
            async with await self._get(url, condition) as response:
                if response.status in _REDIRECTS:
                    url = self._next(item, url, response)
                    condition = {}
                    continue
                if response.status == _NOT_MODIFIED and condition:
                    return Fetched(None, "")
                _check_answer(item, response)
                budget.expect(item, response.content_length or 0)
                text = await _base64(item, response.content.iter_any(), budget, place)
                return Fetched(text, "" if num_redirects else _strong_etag(response.headers))
        raise _lasting(item, "too many redirects")

    def _next(self, item: MediaItem, url: URL, response: aiohttp.ClientResponse) -> URL:
        """Return where a redirect leads.

        Raises:
            ApiError: nowhere, or where nothing may be fetched from.
            ValueError: to no url.
        """
        location = response.headers.get(hdrs.LOCATION) or response.headers.get(hdrs.URI)
        if not location:
            raise _lasting(item, f"{url.host} redirects to nowhere")
        url = url.join(URL(location))
        if reason := self._refuses(url):
            raise _lasting(item, f"redirected to {url.host!r}: {reason}")
        return url

    async def _get(self, url: URL, headers: dict[str, str]) -> aiohttp.ClientResponse:
        proxy = self._proxies.of(url)
        if proxy is None:
            return await self._session.get(url, headers=headers, allow_redirects=False)
        headers, host, name = dict(headers), url.host or "", None
        if is_name(host) and not self._config.media_proxy_resolves:
            # The proxy is told the address: if it looked the name up, it might find another one.
            headers[hdrs.HOST] = url.host_port_subcomponent or host
            name = url.raw_host
            url = url.with_host(await self._allowed_address(host))
        is_tunnelled = url.scheme == "https"
        return await self._to_proxies.get(
            url,
            headers=headers if is_tunnelled else {**headers, **proxy.headers},
            allow_redirects=False,
            proxy=proxy.url,
            proxy_headers=proxy.headers if is_tunnelled else None,
            server_hostname=name if is_tunnelled else None,
        )

    async def _allowed_address(self, name: str) -> str:
        """Return the first allowed address of a name.

        Raises:
            FullError: too many names are being looked up.
            OSError: it has none.
        """
        for found in await self._names.resolve(name, family=socket.AF_UNSPEC):
            if self._may_connect(found["host"]):
                return found["host"]
        raise _ForbiddenAddressError

    def _allowed_socket(self, info: aiohttp.AddrInfoType) -> socket.socket:
        """Return a socket for an address that media may be fetched from.

        This is the last step before connecting. It sees the resolved addresses, after every
        redirect, and addresses that were in the url, so a second look-up cannot bypass it.

        Raises:
            _ForbiddenAddressError: the address is not allowed.
        """
        family, kind, protocol, _, address = info
        if not self._may_connect(str(address[0])):
            raise _ForbiddenAddressError
        return socket.socket(family, kind, protocol)

    def _may_connect(self, address: str) -> bool:
        return may_connect(address, self._config.allow_media_networks)

    def _media_url(self, item: MediaItem) -> URL:
        """Return a client's url, which is checked before anything is fetched.

        Raises:
            ApiError: it is refused; says why.
        """
        try:
            url = URL(item.source)
            reason = self._refuses(url)
        except ValueError:
            url, reason = URL(), "it is malformed"
        if reason is None:
            return url
        hint = f"; {_HINT}" if reason is _NOT_PUBLIC else ""
        raise ApiError(
            400,
            f"The media's url is refused: {reason}.",
            param=item.param,
            code="invalid_media",
            reason=f"{item.param}: {url.host!r:.{_MAX_LOGGED_CHARS}}: {reason}{hint}",
        )

    def _refuses(self, url: URL) -> str | None:
        """Return why a url must not be fetched; None if its text shows no reason."""
        if url.scheme not in ("http", "https") or not url.host:
            return "it must be http:, https: or data:"
        allowed = self._config.allow_media_domains
        if allowed and url.host.lower() not in allowed:
            return "its host is not one that this server may fetch from"
        if not is_name(url.host) and not self._may_connect(url.host):
            return _NOT_PUBLIC  # what a name leads to is not told
        return None


class Budget:
    """The bytes that one request may still download, and the memory that they take."""

    def __init__(self, limit_bytes: int, reservation: Reservation) -> None:
        self._left_bytes = limit_bytes
        self._share = reservation

    def expect(self, item: MediaItem, num_bytes: int) -> None:
        """Check that so much more may be downloaded.

        Raises:
            ApiError: it would be too much.
        """
        if num_bytes > self._left_bytes:
            message = "The media is too large."
            raise ApiError(413, message, param=item.param, code="media_too_large")
        self._share.expect(_as_base64(num_bytes))

    def take(self, item: MediaItem, num_bytes: int) -> None:
        """Take so much more from the budget.

        Raises:
            ApiError: it is too much.
        """
        self.expect(item, num_bytes)
        self._share.take(_as_base64(num_bytes))
        self._left_bytes -= num_bytes


def _expire(time_limit: asyncio.Timeout) -> None:
    """Have the time be up now, unless it is already."""
    if not time_limit.expired():
        time_limit.reschedule(asyncio.get_running_loop().time())


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        # All clients share this session: no cookie of one server may reach another.
        cookie_jar=aiohttp.DummyCookieJar(),
        # Media are packed by themselves. What a server packs all the same is unpacked as it is
        # read, in pieces.
        headers={hdrs.ACCEPT_ENCODING: "identity", hdrs.USER_AGENT: _USER_AGENT},
    )


def _check_answer(item: MediaItem, response: aiohttp.ClientResponse) -> None:
    """Check that an answer has the media for its body.

    Raises:
        ApiError: it has not.
    """
    status = response.status
    if not 200 <= status < 300:
        reason = f"{response.url.host} answers HTTP {status}"
        if status >= 500 or status in _PASSING:
            raise _passing(item, reason)
        raise _lasting(item, reason, f"The media cannot be fetched: HTTP {status}.")
    packing = response.headers.get(hdrs.CONTENT_ENCODING, "").strip().lower()
    if packing not in _UNPACKED:
        raise _lasting(item, f"{response.url.host} packs it as {packing!r}")


def _strong_etag(headers: Mapping[str, str]) -> str:
    """Return the validator that changes with every byte, empty if there is none.

    Times of change are none: an older file may take the place of a newer one.
    """
    etag = headers.get(hdrs.ETAG, "")
    is_quoted = len(etag) >= 2 and etag[0] == etag[-1] == '"'  # a weak one begins with W/
    is_sendable = len(etag) <= _MAX_ETAG_CHARS and etag.isascii() and etag.isprintable()
    return etag if is_quoted and is_sendable else ""


def _as_base64(num_bytes: int) -> int:
    return num_bytes * 4 // 3


async def _base64(
    item: MediaItem, chunks: AsyncIterator[bytes], budget: Budget, place: Place
) -> bytearray:
    """Return the incoming bytes as base64, without a copy of the whole."""
    text = bytearray()
    rest = b""
    in_a_row = 0
    try:
        async for chunk in chunks:
            budget.take(item, len(chunk))
            place.received(len(chunk))
            rest += chunk
            whole = len(rest) - len(rest) % 3
            text += pybase64.b64encode(rest[:whole])
            rest = rest[whole:]
            in_a_row += len(chunk)
            if in_a_row >= _BYTES_A_TURN:  # more may be there already, without a wait for it
                in_a_row = 0
                await asyncio.sleep(0)
        text += pybase64.b64encode(rest)
    except BaseException:
        text.clear()  # aiohttp keeps some errors, with this frame, in reference cycles
        raise
    return text


def _too_many(item: MediaItem) -> ApiError:
    return ApiError(
        429,
        "As many media are being downloaded as may be.",
        param=item.param,
        code="too_many_downloads",
        retry_after_s=_RETRY_AFTER_S,
    )


# One answer for all that may lie in the network, names included: the client must not be able to
# explore ours.
def _passing(item: MediaItem, reason: str) -> ApiError:
    """Return the error of what may go well the next time; clients try again."""
    return ApiError(
        502,
        "The media cannot be fetched now.",
        param=item.param,
        code="media_unavailable",
        retry_after_s=_RETRY_AFTER_S,
        reason=f"{item.param}: {reason[:_MAX_LOGGED_CHARS]}",
    )


def _lasting(
    item: MediaItem, reason: str, message: str = "The media cannot be fetched."
) -> ApiError:
    """Return the error of what another try does not change, as vLLM answers it."""
    reason = f"{item.param}: {reason[:_MAX_LOGGED_CHARS]}"
    return ApiError(422, message, param=item.param, code="media_unavailable", reason=reason)


# --- proxies ---


class Proxy(NamedTuple):
    """Where a proxy is, and what it must be told."""

    url: URL
    headers: dict[str, str]


class Proxies:
    """HTTP_PROXY, HTTPS_PROXY and NO_PROXY, as they are at start."""

    def __init__(self) -> None:
        self._environment = getproxies()
        found = {scheme: _proxy(scheme, self._environment) for scheme in ("http", "https")}
        self._proxies = {scheme: proxy for scheme, proxy in found.items() if proxy is not None}
        for scheme, proxy in self._proxies.items():
            logger.info("media at %s: urls are fetched through %s", scheme, proxy.url)

    def of(self, url: URL) -> Proxy | None:
        """Return the proxy by which a url is fetched, None if there is none for it."""
        proxy = self._proxies.get(url.scheme)
        if proxy is None or proxy_bypass(url.host or "", self._environment):
            return None
        return proxy


def _proxy(scheme: str, environment: Mapping[str, str]) -> Proxy | None:
    text = environment.get(scheme)
    if not text:
        return None
    name = f"{scheme}_proxy"
    name = name if name in os.environ else name.upper()
    try:
        url = URL(text if "://" in text else f"http://{text}")
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        # Without the text: it may hold a password.
        logger.warning("%s is ignored: it is no http: or https: url", name)
        return None
    headers = {}
    if url.user is not None:
        login = base64.b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
        headers["Proxy-Authorization"] = f"Basic {login}"
    return Proxy(url.origin(), headers)
