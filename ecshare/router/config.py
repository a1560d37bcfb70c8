# SPDX-License-Identifier: Apache-2.0
"""The router's options: command line in, one frozen `RouterConfig` out."""

import argparse
from collections.abc import Sequence
from typing import Literal
from urllib.parse import urlsplit

from msgspec import Struct

MIB = 1024 * 1024


class RouterConfig(Struct, frozen=True, kw_only=True):
    """Everything an operator can set. Urls carry no trailing slash."""

    decoders: tuple[str, ...]
    encoders: tuple[str, ...] = ()
    prefillers: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 128 * MIB
    max_media_bytes: int = 128 * MIB
    max_items: int = 64
    hand_over: Literal["streamed", "after"] = "streamed"
    allow_media_domains: tuple[str, ...] = ()
    timeout_s: float = 600.0
    stage_timeout_s: float = 120.0
    media_timeout_s: float = 20.0
    cool_down_s: float = 5.0
    access_log: bool = False


def parse_arguments(
    arguments: Sequence[str] | None = None, prog: str = "python -m ecshare.router"
) -> RouterConfig:
    """Read the command line; leaves with status 2 and one sentence when it makes no sense."""
    parser = make_parser(prog)
    options = parser.parse_args(arguments)
    for name in ("encoder", "prefiller", "decoder"):
        urls = getattr(options, name)
        if len(set(urls)) < len(urls):
            parser.error(f"argument --{name}: the same url is given twice")
    return RouterConfig(
        encoders=tuple(options.encoder),
        prefillers=tuple(options.prefiller),
        decoders=tuple(options.decoder),
        host=options.host,
        port=options.port,
        max_body_bytes=int(options.max_body_mb * MIB),
        max_media_bytes=int(options.max_media_mb * MIB),
        max_items=options.max_items,
        hand_over=options.hand_over,
        allow_media_domains=tuple(domain.lower() for domain in options.allow_media_domain),
        timeout_s=options.timeout_s,
        stage_timeout_s=options.stage_timeout_s,
        media_timeout_s=options.media_timeout_s,
        cool_down_s=options.cool_down_s,
        access_log=options.access_log,
    )


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line; docs/config.md is written from it."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Route chat completions over encode, prefill and decode engines.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    engines = parser.add_argument_group("engines, each may be given several times")
    say = engines.add_argument
    say(
        "--encoder",
        metavar="URL",
        type=engine_url,
        action="append",
        default=[],
        help="encode engine; without one the prefill engines are sent the pictures",
    )
    say(
        "--prefiller",
        metavar="URL",
        type=engine_url,
        action="append",
        default=[],
        help="prefill engine; without one the decode engines prefill",
    )
    say(
        "--decoder",
        metavar="URL",
        type=engine_url,
        action="append",
        required=True,
        default=argparse.SUPPRESS,
        help="decode engine",
    )
    say = parser.add_argument
    say("--host", default="127.0.0.1", help="address to listen on")
    say("--port", type=_port, default=8000, help="port to listen on")
    say("--max-body-mb", type=_positive, default=128, help="largest request body, in MiB")
    say(
        "--max-media-mb",
        type=_positive,
        default=128,
        help="most media to download for one request, in MiB",
    )
    say("--max-items", type=_count, default=64, help="most media items in one request")
    say(
        "--hand-over",
        choices=("streamed", "after"),
        default="streamed",
        help="when decode gets its request: while a free prefill engine computes, so that it loads "
        "what is there already, or always after",
    )
    say(
        "--allow-media-domain",
        metavar="HOST",
        action="append",
        default=[],
        help="fetch media from this host only; may be given several times",
    )
    say("--timeout-s", type=_positive, default=600, help="deadline of a whole request")
    say(
        "--stage-timeout-s",
        type=_positive,
        default=120,
        help="longest wait for an encode or prefill engine before decode does it all",
    )
    say("--media-timeout-s", type=_positive, default=20, help="longest download of one item")
    say("--cool-down-s", type=_positive, default=5, help="rest of an engine that failed")
    say("--access-log", action="store_true", help="log one line per request")
    return parser


def engine_url(text: str) -> str:
    """Return an engine's base url without a trailing slash, or refuse with the reason."""
    try:
        parts = urlsplit(text)
        port_ok = parts.port != 0
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is not a url: {exc}") from exc
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_ok:
        raise argparse.ArgumentTypeError(f"{text!r} must look like http://host:port")
    if parts.username is not None or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(
            "an engine url takes no user, query or fragment; clients' Authorization is passed on"
        )
    return text.rstrip("/")


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text} must be greater than 0 and finite")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _port(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} must be between 1 and 65535")
    return number
