# SPDX-License-Identifier: Apache-2.0
"""The bytes of media, and their identity.

An item is inline or at a url. A url is fetched once for all requests that name it at the same
moment. One that was fetched before is fetched again only if its server says that it has changed, or
if the bytes are needed: for known bytes a request often needs no more than their identity.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import timedelta
from email.utils import parsedate_to_datetime
from functools import partial

import aiohttp
import pybase64
from msgspec import Struct
from yarl import URL

from ecshare.router.blobs import Blobs
from ecshare.router.bounded_cache import BoundedCache
from ecshare.router.client_request import Media, MediaItem
from ecshare.router.concurrent import gather_all
from ecshare.router.config import RouterConfig
from ecshare.router.errors import ApiError
from ecshare.router.identity import identity, inline_url, is_inline
from ecshare.router.memory import Reservation
from ecshare.router.single_flight import SingleFlight

_MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_NOT_MODIFIED = 304
_MAX_LOGGED_CHARS = 300
_HASHED_ON_THE_LOOP = 512 * 1024
"""The characters of a url that are hashed at once, in less than half a millisecond. A thread would
cost more: it waits for Python's lock up to 5 ms each time."""
_MAX_KNOWN_URLS = 100_000
_MAX_KNOWN_URL_BYTES = 32 * 1024 * 1024
_KNOWN_URL_COST = 500
"""Memory of a known url besides its text, roughly."""
_MAX_VALIDATOR_CHARS = 256
_SETTLED = timedelta(minutes=1)
"""A time of change has whole seconds: within this time the bytes may change and keep it."""

IsEnough = Callable[[str], bool]
"""Whether a request needs no more of an item than its uuid."""


class _KnownUrl(Struct, frozen=True):
    uuid: str
    condition: dict[str, str]
    """The headers that ask for the bytes only if they have changed."""


class _Fetched(Struct, frozen=True):
    """The bytes at a url, as base64 text, None if they have not changed."""

    text: bytearray | None
    condition: dict[str, str]


class MediaLoader:
    """Loads the media of requests. Belongs to the event loop's thread."""

    def __init__(self, config: RouterConfig, session: aiohttp.ClientSession) -> None:
        """`session` connects to allowed addresses only. It remains the caller's."""
        self._config = config
        self._session = session
        self._fetching: SingleFlight[tuple[str, ...], _Fetched] = SingleFlight()
        self._known: BoundedCache[tuple[str, str], _KnownUrl] = BoundedCache(
            _MAX_KNOWN_URLS, _MAX_KNOWN_URL_BYTES
        )
        self._counts = {"fetched": 0, "unchanged": 0, "shared": 0}

    def status(self) -> dict[str, int]:
        """Return counts for the status page."""
        return self._counts | {"waiting": self._fetching.num_waiting}

    async def load(
        self,
        items: Sequence[MediaItem],
        blobs: Blobs,
        reservation: Reservation,
        is_enough: IsEnough = lambda _: False,
    ) -> list[Media]:
        """Return the content of each item, in order.

        Equal urls are downloaded once. All downloads share one limit, take memory from
        `reservation` and are kept in `blobs`. An item has no bytes if its uuid `is_enough` and its
        server says that it has not changed.

        Raises:
            ApiError: an item cannot be had; names it.
        """
        distinct = {(item.modality, item.source): item for item in items}
        budget = _Budget(self._config.max_media_bytes, reservation)
        loaded = await _small_ones(distinct, blobs)
        others = {place: item for place, item in distinct.items() if place not in loaded}
        loads = [self._load(item, blobs, budget, is_enough) for item in others.values()]
        loaded |= zip(others, await gather_all(loads), strict=True)
        return [loaded[item.modality, item.source] for item in items]

    async def complete(
        self,
        items: Sequence[MediaItem],
        media: Sequence[Media],
        blobs: Blobs,
        reservation: Reservation,
    ) -> list[Media]:
        """Return the media, with the bytes of those that had none. Their uuid may then be another.

        Raises:
            ApiError: an item cannot be had; names it.
        """
        lacking = [item for item, held in zip(items, media, strict=True) if not held.url]
        loaded = dict(zip(lacking, await self.load(lacking, blobs, reservation), strict=True))
        return [loaded.get(item, held) for item, held in zip(items, media, strict=True)]

    async def _load(
        self, item: MediaItem, blobs: Blobs, budget: "_Budget", is_enough: IsEnough
    ) -> Media:
        if is_inline(item.source):
            return await _identified(item, item.source, blobs)
        if blobs.holds(item.source):
            raise ApiError(400, "The media's url is too long.", param=item.param)
        key = item.modality, item.source
        known = self._known.get(key)
        condition = known.condition if known is not None and is_enough(known.uuid) else {}
        fetched = await self._fetch_once(item, budget, condition)
        if fetched.text is None and known is not None:
            return Media(known.uuid, "")
        assert fetched.text is not None  # without a condition there are always bytes
        # Engines get the hashed bytes, not the url: its server could answer with other bytes
        # later.
        media = await _identified(item, inline_url(blobs.add(fetched.text)), blobs)
        if fetched.condition:
            cost = _KNOWN_URL_COST + len(item.source)
            self._known.put(key, _KnownUrl(media.uuid, fetched.condition), cost)
        else:
            self._known.discard(key)
        return media

    async def _fetch_once(
        self, item: MediaItem, budget: "_Budget", condition: Mapping[str, str]
    ) -> _Fetched:
        """Fetch a url, or wait for another request that does."""
        has_fetched = False

        async def fetch() -> _Fetched:
            nonlocal has_fetched
            has_fetched = True
            return await self._fetch(item, budget, condition)

        key = item.source, *condition.values()
        fetched = await self._fetching.run(key, fetch, self._config.media_timeout_s)
        if not has_fetched:
            self._counts["shared"] += 1
            if fetched.text is not None:
                budget.take(item, len(fetched.text) * 3 // 4)
        return fetched

    async def _fetch(
        self, item: MediaItem, budget: "_Budget", condition: Mapping[str, str]
    ) -> _Fetched:
        try:
            async with asyncio.timeout(self._config.media_timeout_s):
                return await self._follow(item, budget, condition)
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            is_clear = isinstance(exc, aiohttp.ClientConnectorError)
            reason = f"{type(exc).__name__}: {exc}" if is_clear else repr(exc)
            raise _unavailable(item, reason) from exc

    async def _follow(
        self, item: MediaItem, budget: "_Budget", condition: Mapping[str, str]
    ) -> _Fetched:
        url = URL(item.source)
        self._check_media_url(item, url)
        get = partial(self._session.get, headers=condition, allow_redirects=False)
        for _ in range(_MAX_REDIRECTS + 1):
            async with get(url) as response:
                if response.status in _REDIRECTS:
                    url = url.join(URL(response.headers.get("Location", "")))
                    if reason := self._refuses(url):
                        raise _unavailable(item, f"redirected to {url.host!r}: {reason}")
                    continue
                if response.status == _NOT_MODIFIED and condition:
                    self._counts["unchanged"] += 1
                    return _Fetched(None, {})
                if response.status != 200:
                    raise _unavailable(item, f"{url.host} answers HTTP {response.status}")
                budget.expect(item, response.content_length or 0)
                text = await _base64(item, response.content.iter_any(), budget)
                self._counts["fetched"] += 1
                return _Fetched(text, _condition(response.headers))
        raise _unavailable(item, "too many redirects")

    def _check_media_url(self, item: MediaItem, url: URL) -> None:
        """Check a client's url before anything is fetched.

        Raises:
            ApiError: it is refused; says why.
        """
        if reason := self._refuses(url):
            message = f"The media's url is refused: {reason}."
            error = ApiError(400, message, param=item.param, code="invalid_media")
            raise error.with_log_reason(
                f"{item.param}: {url.host!r:.{_MAX_LOGGED_CHARS}}: {reason}"
            )

    def _refuses(self, url: URL) -> str | None:
        """Return why a url must not be fetched; None if its text shows no reason."""
        if url.scheme not in ("http", "https") or not url.host:
            return "it must be http:, https: or data:"
        allowed = self._config.allow_media_domains
        if allowed and url.host.lower() not in allowed:
            return "its host is not one that this server may fetch from"
        return None


async def _small_ones(
    items: Mapping[tuple[str, str], MediaItem], blobs: Blobs
) -> dict[tuple[str, str], Media]:
    """Return those of the items that are inline and small, hashed one by one: many of them at once
    would block the event loop as one large item would.

    Raises:
        ApiError: one holds no valid base64; names it.
    """
    small = {}
    num_hashed = 0
    for place, item in items.items():
        length = blobs.length(item.source) if is_inline(item.source) else _HASHED_ON_THE_LOOP + 1
        if length > _HASHED_ON_THE_LOOP:
            continue
        if num_hashed and num_hashed + length > _HASHED_ON_THE_LOOP:
            await asyncio.sleep(0)
            num_hashed = 0
        num_hashed += length
        small[place] = await _identified(item, item.source, blobs)
    return small


async def _identified(item: MediaItem, url: str, blobs: Blobs) -> Media:
    """Return an inline item with its uuid.

    Raises:
        ApiError: the url holds no valid base64.
    """
    try:
        if blobs.length(url) > _HASHED_ON_THE_LOOP:
            return Media(await asyncio.to_thread(identity, item.modality, url, blobs), url)
        return Media(identity(item.modality, url, blobs), url)
    except ValueError as exc:
        raise ApiError(400, str(exc), param=item.param, code="invalid_media") from exc


def _condition(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that ask for other bytes than those of an answer with `headers`.

    Empty if the server gives nothing that changes with every byte.
    """
    etag, changed = headers.get("ETag", ""), headers.get("Last-Modified", "")
    if _is_printable(etag) and not etag.startswith("W/"):
        return {"If-None-Match": etag}
    if _is_printable(changed) and _is_settled(changed, headers.get("Date", "")):
        return {"If-Modified-Since": changed}
    return {}


def _is_printable(text: str) -> bool:
    return 0 < len(text) <= _MAX_VALIDATOR_CHARS and text.isascii() and text.isprintable()


def _is_settled(changed: str, now: str) -> bool:
    try:
        return parsedate_to_datetime(now) - parsedate_to_datetime(changed) >= _SETTLED
    except (ValueError, TypeError, OverflowError):  # no dates, or one has no time zone
        return False


class _Budget:
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


def _as_base64(num_bytes: int) -> int:
    return num_bytes * 4 // 3


async def _base64(item: MediaItem, chunks: AsyncIterator[bytes], budget: _Budget) -> bytearray:
    """Return the incoming bytes as base64, without a copy of the whole."""
    text = bytearray()
    rest = b""
    try:
        async for chunk in chunks:
            budget.take(item, len(chunk))
            rest += chunk
            whole = len(rest) - len(rest) % 3
            text += pybase64.b64encode(rest[:whole])
            rest = rest[whole:]
        text += pybase64.b64encode(rest)
    except BaseException:
        text.clear()  # aiohttp keeps some errors, with this frame, in reference cycles
        raise
    return text


# One answer for every failure: the client must not be able to explore our network.
def _unavailable(item: MediaItem, reason: str) -> ApiError:
    message = "The media cannot be fetched."
    error = ApiError(400, message, param=item.param, code="media_unavailable")
    return error.with_log_reason(f"{item.param}: {reason[:_MAX_LOGGED_CHARS]}")
