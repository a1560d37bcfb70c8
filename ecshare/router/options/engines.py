# SPDX-License-Identifier: Apache-2.0
"""The engines that an operator gives: their urls in one spelling, and the file of --engines."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import SplitResult, quote, urlsplit

import msgspec
from msgspec import Meta, Struct

from ecshare.router.types import Stage
from ecshare.store.errors import ConfigError

BY_NAME = "dns+"
"""Begins a url that stands for all addresses of its host's name."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_IN_A_PATH = "/%:@!$&'()*+,;=~"
"""What stands in paths as it is, besides letters and digits."""
_HOST = re.compile(r"[^\s\x00-\x1f/\\@]+")
_MAX_FILE_BYTES = 1024 * 1024

Models = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
Urls = Mapping[Stage, tuple[str, ...]]


def engine_url(text: str) -> str:
    """Return the canonical base url of an engine.

    It has no trailing slash, no default port and a lower-case host. A trailing `/v1`, which clients
    of OpenAI's API use, is removed.

    Raises:
        ValueError: the url is not valid; says why.
    """
    if text.startswith(BY_NAME):
        return BY_NAME + _plain(text.removeprefix(BY_NAME), schemes=("http",))
    return _plain(text, schemes=tuple(_DEFAULT_PORTS))


def _plain(text: str, schemes: tuple[str, ...]) -> str:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as exc:
        raise ValueError(f"{text!r} is not a url: {exc}") from exc
    if not _has_host(parts, schemes) or port == 0:
        raise ValueError(f"{text!r} must look like http://host:port")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(
            "an engine url takes no user, query or fragment; clients' Authorization is passed on"
        )
    return url_at(parts, str(parts.hostname))


def url_at(parts: SplitResult, host: str) -> str:
    """Return a url of an engine, at another host."""
    where = f"[{host}]" if ":" in host else host
    if parts.port is not None and parts.port != _DEFAULT_PORTS[parts.scheme]:
        where += f":{parts.port}"
    return f"{parts.scheme}://{where}{_base_path(parts.path)}"


def port_of(parts: SplitResult) -> int:
    """Return the port that a url leads to."""
    return parts.port or _DEFAULT_PORTS[parts.scheme]


def check_distinct(groups: Mapping[str, Iterable[str]]) -> None:
    """Check that no url is given twice, in one group or in two.

    Raises:
        ValueError: one is; names it and the groups.
    """
    seen: dict[str, str] = {}
    for group, urls in groups.items():
        for url in urls:
            if url in seen:
                raise ValueError(
                    f"{group}: {url} is already in {seen[url]}; name each engine once, and leave "
                    "out the stages that have none of their own"
                )
            seen[url] = group


def _has_host(parts: SplitResult, schemes: tuple[str, ...]) -> bool:
    host = parts.hostname or ""
    try:
        host.encode("idna")
    except UnicodeError:  # a part between the dots is empty, or longer than 63 characters
        return False
    return parts.scheme in schemes and bool(_HOST.fullmatch(host))


def _base_path(path: str) -> str:
    path = path.rstrip("/")
    while path.endswith("/v1"):
        path = path.removesuffix("/v1").rstrip("/")
    return quote(path, safe=_IN_A_PATH)


# --- the file of --engines ---


class Given(NamedTuple):
    """The engines of a command line or a file."""

    urls: Urls
    assigned_models: Mapping[str, frozenset[str]] = {}
    """The models of engines that are used for these alone, by url."""


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
    content = read_file(path)
    try:
        return _checked(msgspec.json.decode(content, type=_File))
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def read_file(path: Path) -> bytes:
    """Return the content of a file that an option names.

    Raises:
        ConfigError: it cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as exc:  # such as a NUL in the name
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"{path} cannot be read: {reason}") from exc
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: it is larger than {_MAX_FILE_BYTES} bytes")
    return content


def _checked(said: _File) -> Given:
    groups = {"encoders": said.encoders, "prefillers": said.prefillers, "decoders": said.decoders}
    urls = {name: tuple(map(_url, group)) for name, group in groups.items()}
    check_distinct(urls)
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
