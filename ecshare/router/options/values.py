# SPDX-License-Identifier: Apache-2.0
"""Reads the values of the router's options.

Each function takes one value as text.

Raises:
    ValueError: it is wrong; says how.
"""

import hmac
import importlib.util
import ipaddress
import re
from collections.abc import Callable
from typing import TypeVar

from ecshare.store.integrity import TOKEN_HEADER, read_key, router_token

Number = TypeVar("Number", int, float)
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MIB = 1024 * 1024
ANY_ORIGIN = "*"
_BEARER = "bearer "
_MAX_WORKERS = 256
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
# They belong to a connection or to a body, and the router makes its own.
_NOT_FORWARDED = frozenset((
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type",
    "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization",
    "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "x-request-id",
    TOKEN_HEADER.lower(),
))  # fmt: skip


class Secret:
    """A key that is never printed."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def matches(self, authorization: str | None) -> bool:
        """Tell, in constant time, whether an Authorization header holds the key."""
        scheme, shown = (authorization or "")[: len(_BEARER)], (authorization or "")[len(_BEARER) :]
        is_key = hmac.compare_digest(shown.strip().encode("utf-8", "surrogateescape"), self._key)
        return is_key and scheme.lower() == _BEARER

    def __repr__(self) -> str:
        return "Secret(...)"


def network(text: str) -> Network:
    """Return a network of addresses."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as exc:
        raise ValueError(
            f"{text!r} must be a network like 10.0.0.0/8 or fd00::/8, or one address"
        ) from exc


def header(text: str) -> str:
    """Return the name of a header that clients' requests may bring to engines."""
    if not _TOKEN.fullmatch(text) or text.lower() in _NOT_FORWARDED:
        raise ValueError(
            f"{text!r} must be the name of a header that does not belong to the connection, the "
            "body or the router itself"
        )
    return text


def origin(text: str) -> str:
    """Return an origin as browsers send it, or * for any."""
    if text != ANY_ORIGIN and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/,;*?#@]+", text):
        raise ValueError(
            f"{text!r} must look like https://chat.example or http://localhost:3000, without a "
            "path, or be *"
        )
    return text


def key(text: str) -> Secret:
    """Return a key that is named as env:NAME or file:PATH."""
    return Secret(read_key(text, "a key", in_public=True, is_sent=True))


def token(text: str) -> str:
    """Return what engines recognise the router by that has the key that `text` names, or none."""
    return "" if text == "none" else router_token(read_key(text, "a key", in_public=True))


def collector(text: str) -> str:
    """Return the url of an OpenTelemetry collector."""
    try:
        importlib.util.find_spec("opentelemetry.exporter.otlp.proto.grpc")
    except ModuleNotFoundError as exc:
        raise ValueError(
            "spans need ecshare's extra [otel] (pip install opentelemetry-exporter-otlp)"
        ) from exc
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", text):
        raise ValueError(f"{text!r} must look like http://host:4317")
    return text


def positive(text: str) -> float:
    """Return a number above 0."""
    return _number(text, float, lambda number: 0 < number < 1e9, "a number above 0 and below 1e9")


def mebibytes(text: str) -> int:
    """Return a number of bytes, from that of MiB."""
    return int(positive(text) * MIB)


def share(text: str) -> float:
    """Return a number from 0 to 1."""
    return _number(text, float, lambda number: 0 <= number <= 1, "a number from 0 to 1")


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    return _number(text, int, lambda number: number >= 1, "a whole number of at least 1")


def workers(text: str) -> int:
    """Return a number of processes."""
    what = f"a whole number from 1 to {_MAX_WORKERS}"
    return _number(text, int, lambda number: 1 <= number <= _MAX_WORKERS, what)


def natural(text: str) -> int:
    """Return a whole number of at least 0."""
    return _number(text, int, lambda number: number >= 0, "a whole number of at least 0")


def port(text: str) -> int:
    """Return the number of a port."""
    return _number(text, int, lambda n: 1 <= n <= 65535, "a whole number from 1 to 65535")


def _number(
    text: str, read: Callable[[str], Number], is_right: Callable[[Number], bool], right: str
) -> Number:
    try:
        number = read(text)
    except ValueError:
        number = None
    if number is None or not is_right(number):
        raise ValueError(f"{text!r} must be {right}")
    return number
