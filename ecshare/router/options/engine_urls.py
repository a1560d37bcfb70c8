# SPDX-License-Identifier: Apache-2.0
"""The urls of engines, in one spelling. Pure."""

import re
from collections.abc import Iterable, Mapping
from urllib.parse import SplitResult, quote, urlsplit

BY_NAME = "dns+"
"""Begins a url that stands for all addresses of its host's name."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_IN_A_PATH = "/%:@!$&'()*+,;=~"
"""What stands in paths as it is, besides letters and digits."""
_HOST = re.compile(r"[^\s\x00-\x1f/\\@]+")


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
