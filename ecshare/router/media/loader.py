# SPDX-License-Identifier: Apache-2.0
"""The bytes of media, and their identity.

An item is inline or at a url. A url is fetched once for all requests that name it at the same
moment. One that was fetched before is fetched again only if its server says that it has changed, or
if the bytes are needed: for known bytes a request often needs no more than their identity.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from ecshare.router.api.client_request import Media, MediaItem
from ecshare.router.api.errors import ApiError
from ecshare.router.http.bodies import Blobs, Reservation
from ecshare.router.media.fetcher import Budget, Fetched, Fetcher
from ecshare.router.media.identity import identity, inline_url, is_inline
from ecshare.router.media.places import Turns
from ecshare.router.options.config import RouterConfig
from ecshare.router.reuse import BoundedCache, SingleFlight
from ecshare.store.threads import gather_all

_HASHED_ON_THE_LOOP = 1024 * 1024
"""The characters of a url that are hashed at once, in less than half a millisecond. A thread would
cost more: it waits for Python's lock up to 5 ms each time."""
_MAX_KNOWN_URLS = 100_000
_MAX_KNOWN_URL_BYTES = 32 * 1024 * 1024
_KNOWN_URL_COST = 500
"""Memory of a known url besides its text, roughly."""

IsEnough = Callable[[str], bool]
"""Whether a request needs no more of an item than its uuid."""


class _KnownUrl(Struct, frozen=True):
    uuid: str
    etag: str
    """By which the url's server tells whether the bytes have changed."""


class MediaLoader:
    """Loads the media of requests. Belongs to the event loop's thread."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._fetcher = Fetcher(config)
        # Its own threads: clients keep them busy, and nobody else must wait for them.
        self._hashing = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="ecshare-hashing")
        self._fetching: SingleFlight[tuple[str, ...], Fetched] = SingleFlight()
        self._known: BoundedCache[tuple[str, str], _KnownUrl] = BoundedCache(
            _MAX_KNOWN_URLS, _MAX_KNOWN_URL_BYTES
        )
        self._counts = {"fetched": 0, "unchanged": 0, "shared": 0}

    async def close(self) -> None:
        """End all downloads."""
        await self._fetcher.close()
        self._hashing.shutdown(wait=False, cancel_futures=True)

    def status(self) -> dict[str, int]:
        """Return counts for the status page."""
        refused = self._fetcher.num_refused
        return self._counts | {"refused": refused, "waiting": self._fetching.num_waiting}

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
        loaded: dict[tuple[str, str], Media] = {}
        for key, item in distinct.items():
            if is_inline(item.source) and blobs.length(item.source) <= _HASHED_ON_THE_LOOP:
                if loaded:
                    await asyncio.sleep(0)  # many small ones would block others as a large one
                loaded[key] = _identified(item, item.source, blobs)
        others = {key: item for key, item in distinct.items() if key not in loaded}
        if others:
            budget = Budget(self._config.max_media_bytes, reservation)
            turns = self._fetcher.turns()
            loads = [
                self._identified(item, item.source, blobs)
                if is_inline(item.source)
                else self._load(item, blobs, budget, turns, is_enough)
                for item in others.values()
            ]
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

    async def _load(  # noqa: PLR0913 — what all items of a request share
        self,
        item: MediaItem,
        blobs: Blobs,
        budget: Budget,
        turns: Turns,
        is_enough: IsEnough,
    ) -> Media:
        if blobs.holds(item.source):
            raise ApiError(400, "The media's url is too long.", param=item.param)
        key = item.modality, item.source
        async with turns.turn():
            known = self._known.get(key)
            etag = known.etag if known is not None and is_enough(known.uuid) else ""
            fetched = await self._fetch_once(item, budget, etag)
        if fetched.text is None and known is not None:
            return Media(known.uuid, "")
        assert fetched.text is not None  # without a validator there are always bytes
        # Engines get the hashed bytes, not the url: its server could answer with other bytes
        # later.
        media = await self._identified(item, inline_url(blobs.add(fetched.text)), blobs)
        if fetched.etag:
            cost = _KNOWN_URL_COST + len(item.source)
            self._known.put(key, _KnownUrl(media.uuid, fetched.etag), cost)
        else:
            self._known.discard(key)
        return media

    async def _fetch_once(self, item: MediaItem, budget: Budget, etag: str) -> Fetched:
        """Fetch a url, or wait for another request that does."""
        has_fetched = False

        async def fetch() -> Fetched:
            nonlocal has_fetched
            has_fetched = True
            return await self._fetcher.fetch(item, budget, etag)

        key = item.source, etag
        fetched = await self._fetching.run(key, fetch, self._config.media_timeout_s)
        if has_fetched:
            self._counts["unchanged" if fetched.text is None else "fetched"] += 1
        else:
            self._counts["shared"] += 1
            if fetched.text is not None:
                budget.take(item, len(fetched.text) * 3 // 4)
        return fetched

    async def _identified(self, item: MediaItem, url: str, blobs: Blobs) -> Media:
        """Return an inline item with its uuid, which a thread computes if it is long.

        Raises:
            ApiError: the url holds no valid base64.
        """
        if blobs.length(url) <= _HASHED_ON_THE_LOOP:
            return _identified(item, url, blobs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._hashing, _identified, item, url, blobs)


def _identified(item: MediaItem, url: str, blobs: Blobs) -> Media:
    try:
        return Media(identity(item.modality, url, blobs), url)
    except ValueError as exc:
        raise ApiError(400, str(exc), param=item.param, code="invalid_media") from exc
