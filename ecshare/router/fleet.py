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
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from ecshare.router.engine_urls import BY_NAME, engine_url, port_of, repeated_url, url_at
from ecshare.router.engines import EnginePool, Stage
from ecshare.router.roster import Given, Roster, Urls
from ecshare.store.errors import ConfigError
from ecshare.store.threads import gather_all

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
_RESOLVE_TIMEOUT_S = 5.0
_MAX_FILE_BYTES = 1024 * 1024
_MAX_ADDRESSES = 256

Models = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]


class _Engine(Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    models: Models | None = None


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    decoders: list[str | _Engine]
    encoders: list[str | _Engine] = []
    prefillers: list[str | _Engine] = []


def read_engines(path: Path) -> Given:
    """Return the engines in a file, with canonical urls: a JSON object of lists.

    An entry is a url, or an object of `url` and `models`.

    Raises:
        ConfigError: the file cannot be read, or says something else; names the field at fault.
    """
    try:
        said = msgspec.json.decode(_content(path), type=_File)
        return _checked(said)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {_MAX_FILE_BYTES} bytes")
    return content


def _checked(said: _File) -> Given:
    groups = {"encoders": said.encoders, "prefillers": said.prefillers, "decoders": said.decoders}
    urls = {name: tuple(map(_url, group)) for name, group in groups.items()}
    if twice := repeated_url(urls):
        raise ValueError(f"{twice.group}: {twice.url} is already in {twice.earlier_group}")
    if not urls["decoders"]:
        raise ValueError("decoders: name at least one engine")
    assigned = {
        _url(each): frozenset(each.models)
        for group in groups.values()
        for each in group
        if isinstance(each, _Engine) and each.models is not None
    }
    return Given(dict(zip(Stage, urls.values(), strict=True)), assigned)


def _url(entry: str | _Engine) -> str:
    return engine_url(entry if isinstance(entry, str) else entry.url)


def fixed(urls: Iterable[str]) -> list[str]:
    """Return the urls of single engines, without those that stand for a name's addresses."""
    return [url for url in urls if not url.startswith(BY_NAME)]


class FleetWatch:
    """Keeps the pools as the file, the names and the operator say. Belongs to the event loop's
    thread.
    """

    def __init__(self, pools: Mapping[Stage, EnginePool], urls: Urls, path: Path | None) -> None:
        """`path`: the file that `urls` come from, None if they stay."""
        self._pools = pools
        self._given = Given(urls)
        self._path = path
        self._refused = ""
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._roster = Roster(self._expanded())

    async def start(self) -> None:
        """Look once, which takes a few seconds at most, and go on in the background."""
        await self.look()
        if self._path is not None or any(self._names()):
            self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def look(self) -> None:
        """Read the file and look up the names. What cannot be read or looked up stays as it was."""
        if self._path is not None:
            await self._read(self._path)
        await gather_all([self._resolve(url) for url in self._names()])
        self._roster.give(self._expanded())
        self._update()

    def add(self, stage: Stage, url: str, models: frozenset[str] | None) -> None:
        """See `Roster.add`."""
        self._roster.add(stage, url, models)
        self._update()

    def drain(self, url: str) -> Stage:
        """See `Roster.drain`. Returns the stage of the engine."""
        self._roster.drain(url)
        self._update()
        return self._roster.stage_of(url)

    def remove(self, url: str) -> Stage:
        """See `Roster.remove`. Returns the stage that the engine had."""
        stage = self._roster.stage_of(url)
        self._roster.remove(url)
        self._update()
        return stage

    def _update(self) -> None:
        for stage, pool in self._pools.items():
            urls = self._roster.urls(stage)
            if urls != tuple(engine.url for engine in pool):
                logger.info("the %s engines are now: %s", stage, ", ".join(urls) or "none")
            pool.update(urls, self._roster.assigned_models, self._roster.draining)

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

    def _expanded(self) -> Given:
        """Return what is given, with the addresses of names instead of the names."""
        urls: dict[Stage, tuple[str, ...]] = {}
        assigned: dict[str, frozenset[str]] = {}
        for stage, group in self._given.urls.items():
            engines = {each: url for url in group for each in self._addresses_of(url)}
            urls[stage] = tuple(engines)
            models = {each: self._given.assigned_models.get(url) for each, url in engines.items()}
            assigned |= {each: names for each, names in models.items() if names is not None}
        return Given(urls, assigned)

    def _addresses_of(self, url: str) -> tuple[str, ...]:
        return self._addresses.get(url, ()) if url.startswith(BY_NAME) else (url,)
