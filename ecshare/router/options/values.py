# SPDX-License-Identifier: Apache-2.0
"""Reads the values of the router's options.

Each function takes one value as text.

Raises:
    argparse.ArgumentTypeError: it is wrong; says how.
"""

import argparse
import functools
import importlib.util
import ipaddress
import re
from collections.abc import Callable
from typing import TypeVar

from ecshare.router.options.engine_urls import engine_url
from ecshare.router.options.secret import Secret
from ecshare.store.integrity import TOKEN_HEADER, read_key, router_token

T = TypeVar("T")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MIB = 1024 * 1024
ANY_ORIGIN = "*"
_MAX_WORKERS = 256
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
# They belong to a connection or to a body, and the router makes its own.
_NOT_FORWARDED = frozenset((
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type",
    "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization",
    "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "x-request-id",
    TOKEN_HEADER.lower(),
))  # fmt: skip


def _telling(read: Callable[[str], T]) -> Callable[[str], T]:
    """Have argparse show the message of what `read` raises. It would hide it otherwise."""

    @functools.wraps(read)
    def reading(text: str) -> T:
        try:
            return read(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from exc

    return reading


@_telling
def engine(text: str) -> str:
    """Return the url of an engine, as `engine_url` does."""
    return engine_url(text)


def network(text: str) -> Network:
    """Return a network of addresses."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a network like 10.0.0.0/8 or fd00::/8, or one address"
        ) from exc


def header(text: str) -> str:
    """Return the name of a header that clients' requests may bring to engines."""
    if not _TOKEN.fullmatch(text) or text.lower() in _NOT_FORWARDED:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be the name of a header that does not belong to the connection, the "
            "body or the router itself"
        )
    return text


def origin(text: str) -> str:
    """Return an origin as browsers send it, or * for any."""
    if text != ANY_ORIGIN and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/,;*?#@]+", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} must look like https://chat.example or http://localhost:3000, without a "
            "path, or be *"
        )
    return text


@_telling
def key(text: str) -> Secret:
    """Return a key that is named as env:NAME or file:PATH."""
    return Secret(read_key(text, "a key", in_public=True, is_sent=True))


def collector(text: str) -> str:
    """Return the url of an OpenTelemetry collector."""
    try:
        importlib.util.find_spec("opentelemetry.exporter.otlp.proto.grpc")
    except ModuleNotFoundError as exc:
        raise argparse.ArgumentTypeError(
            "spans need ecshare's extra [otel] (pip install opentelemetry-exporter-otlp)"
        ) from exc
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} must look like http://host:4317")
    return text


@_telling
def token(text: str) -> str:
    """Return what engines recognise the router by that has the key that `text` names, or none."""
    if text == "none":
        return ""
    return router_token(read_key(text, "a key", in_public=True))


@_telling
def positive(text: str) -> float:
    """Return a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0 and below 1e9")
    return number


def mebibytes(text: str) -> int:
    """Return a number of bytes, from that of MiB."""
    return int(positive(text) * MIB)


def share(text: str) -> float:
    """Return a number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 to 1")
    return number


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    if (number := _whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return number


def workers(text: str) -> int:
    """Return a number of processes."""
    if not 1 <= (number := _whole(text)) <= _MAX_WORKERS:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a whole number from 1 to {_MAX_WORKERS}"
        )
    return number


def natural(text: str) -> int:
    """Return a whole number of at least 0."""
    if (number := _whole(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 0")
    return number


def port(text: str) -> int:
    """Return the number of a port."""
    if not 1 <= (number := _whole(text)) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to 65535")
    return number


def _whole(text: str) -> int:
    """Return the number, or -1 if the text is not a whole number."""
    try:
        return int(text)
    except ValueError:
        return -1
