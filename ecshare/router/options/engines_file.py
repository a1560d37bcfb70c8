# SPDX-License-Identifier: Apache-2.0
"""The file of engines that --engines names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from ecshare.router.options.engine_urls import check_distinct, engine_url
from ecshare.router.types import Stage
from ecshare.store.errors import ConfigError

_MAX_FILE_BYTES = 1024 * 1024

Models = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]

Urls = Mapping[Stage, tuple[str, ...]]


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
