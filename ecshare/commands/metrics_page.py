# SPDX-License-Identifier: Apache-2.0
"""Fetches and parses /metrics of engines and routers. Answers may be hostile."""

import asyncio
import io
import math
import re
import ssl
import time
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from ecshare.doctor.findings import printable
from ecshare.store.errors import ConfigError

_WITHIN_S = 5.0
_MOST_BYTES = 8 << 20
_MOST_SERIES = 50_000
_PIECE_BYTES = 1 << 16
_OURS = ("ecshare_", "kvshare_", "vllm:")
_LINE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]{0,127})(?:\{(.{0,4000})\})?[ \t]+(\S{1,40})")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
# Checked first: a search for labels in hostile text takes quadratic time.
_LABELS = re.compile(rf"(?:{_LABEL.pattern},?)*")
_PATH = re.compile(r"/[!-~]*")
_HOST = re.compile(r"[A-Za-z0-9._:%-]+")

Labels = tuple[tuple[str, str], ...]


class Unreadable(Exception):
    """A target gave no metrics; the text says why."""


class Endpoint(NamedTuple):
    """The address of /metrics of one process."""

    name: str
    """Host and port, for display."""
    host: str
    port: int
    path: str
    is_tls: bool


def read_url(url: str) -> Endpoint:
    """Return the endpoint of a url; without a path, its /metrics.

    Raises:
        ConfigError: it is no url of http or https, or holds a login.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port, parts = "", None, urlsplit("")
    path = parts.path if parts.path not in ("", "/") else "/metrics"
    path += f"?{parts.query}" if parts.query else ""
    is_url = parts.scheme in ("http", "https") and _HOST.fullmatch(host) and _PATH.fullmatch(path)
    if not is_url or port == 0 or "@" in parts.netloc:
        shown = printable(url.rpartition("@")[2])
        raise ConfigError(f"argument url: {shown!r} is no url; write http://host:port")
    is_tls = parts.scheme == "https"
    at = port or (443 if is_tls else 80)
    return Endpoint(f"[{host}]:{at}" if ":" in host else f"{host}:{at}", host, at, path, is_tls)


class Page:
    """The samples of one answer: those of vLLM's metrics and ours with finite values."""

    def __init__(self, text: str, at_s: float) -> None:
        """`at_s`: when it was fetched."""
        self.at_s = at_s
        self._series: dict[str, dict[Labels, float]] = {}
        number = 0
        for line in text.split("\n"):
            found = _LINE.match(line) if line.startswith(_OURS) else None
            value = _number(found[3]) if found else None
            if found is None or value is None or not _LABELS.fullmatch(found[2] or ""):
                continue
            labels = tuple(sorted(_LABEL.findall(found[2] or "")))
            self._series.setdefault(found[1], {})[labels] = value
            number += 1
            if number == _MOST_SERIES:
                break

    def has(self, *prefixes: str) -> bool:
        """Return whether a metric's name begins with one of `prefixes`."""
        return any(name.startswith(prefixes) for name in self._series)

    def series(self, name: str, **labels: str) -> dict[Labels, float]:
        """Return the samples of `name` that have these labels."""
        wanted = set(labels.items())
        return {own: value for own, value in self._series.get(name, {}).items() if wanted <= {*own}}

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of `series`; None: there are none."""
        found = self.series(name, **labels)
        return sum(found.values()) if found else None

    def increase(self, before: "Page", name: str, **labels: str) -> float | None:
        """Return by how much a counter grew since `before`; None: there is none.

        A counter that decreased was reset to zero, as Prometheus assumes too.
        """
        found = self.series(name, **labels)
        if not found:
            return None
        old = before.series(name, **labels)
        return sum(
            value - old.get(own, 0.0) if value >= old.get(own, 0.0) else value
            for own, value in found.items()
        )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and abs(value) < 1e18 else None


async def fetch(endpoint: Endpoint, headers: Mapping[str, str]) -> Page:
    """Fetch the metrics of a process. Redirects are not followed.

    Raises:
        Unreadable: it does not answer within some seconds, or answers anything else.
    """
    try:
        async with asyncio.timeout(_WITHIN_S):
            raw = await _exchange(endpoint, headers)
        text = _body(raw)
    except TimeoutError:
        raise Unreadable(f"no whole answer within {_WITHIN_S:g} s") from None
    except (OSError, HTTPException, ValueError, OverflowError) as exc:
        raise Unreadable(printable(str(exc)) or type(exc).__name__) from exc
    page = Page(text, time.monotonic())
    if not page.has(""):
        raise Unreadable("answers, but has no metrics of vLLM or ecshare")
    return page


async def _exchange(endpoint: Endpoint, headers: Mapping[str, str]) -> bytes:
    """Return all bytes that the server sends until it closes the connection."""
    context = ssl.create_default_context() if endpoint.is_tls else None
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
    try:
        all_headers = {
            "Host": endpoint.name,
            "Connection": "close",
            "Accept": "text/plain",
            "Accept-Encoding": "identity",
            **headers,
        }
        lines = [f"GET {endpoint.path} HTTP/1.1", *(f"{k}: {v}" for k, v in all_headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        await writer.drain()
        raw = bytearray()
        while piece := await reader.read(_PIECE_BYTES):
            raw += piece
            if len(raw) > _MOST_BYTES:
                raise Unreadable(f"answers with more than {_MOST_BYTES >> 20} MiB")
    finally:
        writer.transport.abort()
    return bytes(raw)


class _Received:
    """The received bytes, as the socket that HTTPResponse reads."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, *_: Any) -> io.BytesIO:
        """Return the bytes as a file."""
        return io.BytesIO(self._raw)


def _body(raw: bytes) -> str:
    answer = HTTPResponse(cast("Any", _Received(raw)))
    answer.begin()
    if answer.status != 200:
        redirect = ", a redirect, which is not followed" if 300 <= answer.status < 400 else ""
        wants = "; it may want a key: --header" if answer.status in (401, 403) else ""
        raise Unreadable(f"answers with status {answer.status}{redirect}{wants}")
    return answer.read().decode("utf-8", "replace")
