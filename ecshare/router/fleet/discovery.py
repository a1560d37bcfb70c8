# SPDX-License-Identifier: Apache-2.0
"""Which engines there are: given at start, or in a file that is read again when it changes.

A url that begins with `dns+http://` stands for all addresses of its host's name, such as that of a
headless service. The name is looked up again and again.
"""

import asyncio
import logging
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from ecshare.router.fleet.engines import EnginePool
from ecshare.router.options.engines import BY_NAME, Given, Urls, port_of, read_engines, url_at
from ecshare.router.types import Stage
from ecshare.store.errors import ConfigError
from ecshare.store.threads import end_all, gather_all

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
_RESOLVE_TIMEOUT_S = 5.0
_MAX_ADDRESSES = 256


def fixed(urls: Iterable[str]) -> list[str]:
    """Return the urls of single engines, without those that stand for a name's addresses."""
    return [url for url in urls if not url.startswith(BY_NAME)]


class FleetWatch:
    """Keeps the pools as the file and the names say. Belongs to the event loop's thread."""

    def __init__(self, pools: Mapping[Stage, EnginePool], urls: Urls, path: Path | None) -> None:
        """`path`: the file that `urls` come from, None if they stay."""
        self._pools = pools
        self._given = Given(urls)
        self._path = path
        self._refused = ""
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look once, which takes a few seconds at most, and go on in the background."""
        await self.look()
        if self._path is not None or any(self._names()):
            self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop."""
        await end_all([self._watching] if self._watching else [])

    async def look(self) -> None:
        """Read the file and look up the names. What cannot be read or looked up stays as it was."""
        if self._path is not None:
            await self._read(self._path)
        await gather_all([self._resolve(url) for url in self._names()])
        models = self._given.assigned_models
        for stage, pool in self._pools.items():
            given = self._given.urls[stage]
            engines = {each: url for url in given for each in self._addresses_of(url)}
            if list(engines) != [engine.url for engine in pool]:
                logger.info("the %s engines are now: %s", stage, ", ".join(engines) or "none")
            pool.update(
                engines, {each: models[url] for each, url in engines.items() if url in models}
            )

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def _read(self, path: Path) -> None:
        try:
            self._given = await asyncio.to_thread(read_engines, path)
            self._refused = ""
        except ConfigError as exc:
            if str(exc) != self._refused:
                logger.warning("the engines stay as they are: %s", exc)
            self._refused = str(exc)

    def _names(self) -> Iterator[str]:
        groups = self._given.urls.values()
        return (url for urls in groups for url in urls if url.startswith(BY_NAME))

    async def _resolve(self, url: str) -> None:
        parts = urlsplit(url.removeprefix(BY_NAME))
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                found = await asyncio.get_running_loop().getaddrinfo(
                    parts.hostname, port_of(parts), type=socket.SOCK_STREAM
                )
        except (OSError, TimeoutError, ValueError) as exc:
            # Ten lines of one kind in ten seconds are the most; see logs.py.
            logger.warning("the addresses of %s stay as they are: %s", url, exc or "no answer")
            return
        addresses = sorted({str(address[0]) for *_, address in found})
        self._addresses[url] = tuple(url_at(parts, each) for each in addresses[:_MAX_ADDRESSES])

    def _addresses_of(self, url: str) -> tuple[str, ...]:
        return self._addresses.get(url, ()) if url.startswith(BY_NAME) else (url,)
