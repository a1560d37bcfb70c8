# SPDX-License-Identifier: Apache-2.0
"""The router's options: from the command line to one frozen `RouterConfig`."""

import argparse
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from ecshare import __version__
from ecshare.router.addresses import Network
from ecshare.router.engine_urls import engine_url, repeated_url
from ecshare.router.engines import Stage
from ecshare.router.fleet import read_engines
from ecshare.router.roster import Urls
from ecshare.router.secret import Secret, read_secret
from ecshare.store.config import StoreConfig, parse
from ecshare.store.errors import ConfigError
from ecshare.store.integrity import read_key, router_token

_ENGINES = {
    "encoder": Stage.ENCODE,
    "prefiller": Stage.PREFILL,
    "decoder": Stage.DECODE,
}
_NO_KEY = "none"

MIB = 1024 * 1024


class AdminConfig(Struct, frozen=True):
    """The operator's own port. There is none without a key."""

    host: str
    port: int
    key: Secret


class RouterConfig(Struct, frozen=True, kw_only=True):
    """All that an operator can set. Urls have the form that `engine_url` returns."""

    decoders: tuple[str, ...]
    encoders: tuple[str, ...] = ()
    prefillers: tuple[str, ...] = ()
    engines_file: Path | None = None
    """The file that the engines come from, if it is to be read again when it changes."""
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 128 * MIB
    max_media_bytes: int = 128 * MIB
    max_in_flight_bytes: int = 2048 * MIB
    max_index_bytes: int = 128 * MIB
    prefill: Literal["needed", "always"] = "needed"
    max_new_chars: int = 1000
    max_items: int = 64
    max_connections: int = 4096
    hand_over: Literal["streamed", "after"] = "streamed"
    allow_media_domains: tuple[str, ...] = ()
    allow_media_networks: tuple[Network, ...] = ()
    timeout_s: float = 600.0
    client_timeout_s: float = 20.0
    first_byte_timeout_s: float = 60.0
    stage_timeout_s: float = 120.0
    media_timeout_s: float = 20.0
    cool_down_s: float = 5.0
    balance: Literal["affinity", "load"] = "affinity"
    when_overloaded: Literal["refuse", "decode"] = "refuse"
    retry_share: float = 0.2
    max_encodes: int = 0
    max_prefills: int = 0
    max_decodes: int = 0
    drain_s: float = 25.0
    status_key: Secret | None = None
    admin: AdminConfig | None = None
    adapter_encoders: Literal["listed", "base"] = "listed"
    access_log: bool = False
    store: StoreConfig | None = None
    router_token: str = ""
    """The secret by which engines behind a RouterGate recognise this router."""


def parse_arguments(
    arguments: Sequence[str] | None = None, prog: str = "python -m ecshare.router"
) -> RouterConfig:
    """Parse the command line. Exits with status 2 and one sentence if it is wrong."""
    parser = make_parser(prog)
    options = parser.parse_args(arguments)
    try:
        urls = _engine_urls(options)
        admin = _admin(options)
    except ConfigError as exc:
        parser.error(str(exc))
    return RouterConfig(
        encoders=urls[Stage.ENCODE],
        prefillers=urls[Stage.PREFILL],
        decoders=urls[Stage.DECODE],
        engines_file=options.engines,
        host=options.host,
        port=options.port,
        max_body_bytes=int(options.max_body_mb * MIB),
        max_media_bytes=int(options.max_media_mb * MIB),
        max_in_flight_bytes=int(options.max_in_flight_mb * MIB),
        max_index_bytes=int(options.max_index_mb * MIB),
        prefill=options.prefill,
        max_new_chars=options.max_new_chars,
        max_items=options.max_items,
        max_connections=options.max_connections,
        hand_over=options.hand_over,
        allow_media_domains=tuple(domain.lower() for domain in options.allow_media_domain),
        allow_media_networks=tuple(options.allow_media_network),
        timeout_s=options.timeout_s,
        client_timeout_s=options.client_timeout_s,
        first_byte_timeout_s=options.first_byte_timeout_s,
        stage_timeout_s=options.stage_timeout_s,
        media_timeout_s=options.media_timeout_s,
        cool_down_s=options.cool_down_s,
        balance=options.balance,
        when_overloaded=options.when_overloaded,
        retry_share=options.retry_share,
        max_encodes=options.max_encodes,
        max_prefills=options.max_prefills,
        max_decodes=options.max_decodes,
        drain_s=options.drain_s,
        status_key=options.status_key,
        admin=admin,
        adapter_encoders=options.adapter_encoders,
        access_log=options.access_log,
        store=options.store,
        router_token=options.router_key,
    )


class _Repeated(list[str]):
    """The empty default of a repeatable option; its text explains what the default means."""

    def __init__(self, meaning: str) -> None:
        super().__init__()
        self._meaning = meaning

    def __str__(self) -> str:
        return self._meaning


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line. docs/config.md is generated from it."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Route completions over encode, prefill and decode engines.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"ecshare {__version__}", help="print the version"
    )
    engines = parser.add_argument_group("engines, each may be given several times")
    say = engines.add_argument
    say(
        "--encoder",
        metavar="URL",
        type=_engine,
        action="append",
        default=_Repeated("none"),
        help="encode engine; without one the prefill engines are sent the pictures",
    )
    say(
        "--prefiller",
        metavar="URL",
        type=_engine,
        action="append",
        default=_Repeated("none"),
        help="prefill engine; without one the decode engines prefill",
    )
    say(
        "--decoder",
        metavar="URL",
        type=_engine,
        action="append",
        default=_Repeated("required, or --engines"),
        help="decode engine; dns+http://decode.example:8003 stands for all addresses of that name, "
        "for each stage; they are looked up every few seconds",
    )
    say(
        "--engines",
        metavar="FILE",
        type=Path,
        default=None,
        help="a JSON file of the lists encoders, prefillers and decoders, instead of the above; an "
        "entry is a url, or an object of url and models: an engine that is used for these models "
        "alone, whatever else it lists; the file is read every few seconds: engines "
        "that are new get requests, and engines that are gone only finish those that they have; a "
        "file that is wrong changes nothing",
    )
    say = parser.add_argument
    say("--host", metavar="ADDRESS", default="127.0.0.1", help="address to listen on")
    say("--port", metavar="PORT", type=_port, default=8000, help="port to listen on")
    say("--max-body-mb", metavar="MIB", type=_positive, default=128, help="largest request body")
    say(
        "--max-media-mb",
        metavar="MIB",
        type=_positive,
        default=128,
        help="most media to download for one request",
    )
    say(
        "--max-in-flight-mb",
        metavar="MIB",
        type=_positive,
        default=2048,
        help="most memory for all requests in flight, with the media that are downloaded for them; "
        "a request beyond it is answered 429; an eighth of it is for requests of up to 1 MiB alone",
    )
    say(
        "--max-index-mb",
        metavar="MIB",
        type=_positive,
        default=128,
        help="most memory for what encode engines have reported, by which they are asked once for "
        "a picture; as much again for the prompts that are stored; one takes about 600 bytes",
    )
    say(
        "--prefill",
        choices=("needed", "always"),
        default="needed",
        help="whether prefill engines are asked for prompts that they have stored, or only for "
        "others; decode engines must be kv_both or kv_consumer, and compute what is lost",
    )
    say(
        "--max-new-chars",
        metavar="N",
        type=_natural,
        default=1000,
        help="most text, in characters of its JSON, that decode computes itself behind a prompt "
        "that is stored, such as the next turn of a conversation: the answer and the question "
        "since then; 0: only prompts that are stored whole go past prefill",
    )
    say(
        "--store",
        metavar="URL",
        type=_store,
        default=None,
        help="where routers of one fleet share what encode engines have reported: a url, or a JSON "
        "object of url, storage_options, folder_access, epoch, io_timeout_s and integrity_key, "
        "which mean what they mean for connectors",
    )
    say("--max-items", metavar="N", type=_count, default=64, help="most media items in one request")
    say(
        "--max-connections",
        metavar="N",
        type=_count,
        default=4096,
        help="most connections of clients, or a quarter of the open files that the process may "
        "have (ulimit -n) where that is less; one beyond it takes the place of one that has sent "
        "no request yet, or is answered 503 and closed",
    )
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
        default=_Repeated("all public hosts"),
        help="fetch media from this host only; may be given several times",
    )
    say(
        "--allow-media-network",
        metavar="CIDR",
        type=_network,
        action="append",
        default=_Repeated("public addresses only"),
        help="fetch media from addresses in this network too, although it is not public; "
        "may be given several times",
    )
    for name, default_s, purpose in (
        ("--timeout-s", 600, "deadline of a whole request"),
        (
            "--client-timeout-s",
            20,
            "longest wait for a client: for the head of its next request, for a body beyond what "
            "it takes at 64 KiB a second, and for it to read on; then its connection is closed",
        ),
        (
            "--first-byte-timeout-s",
            60,
            "longest wait for the first byte of a streamed answer before another decode engine is "
            "asked, if one is up; an engine that is silent for so long is left out",
        ),
        (
            "--stage-timeout-s",
            120,
            "longest wait for an encode or prefill engine; one that is silent to everybody for so "
            "long is left out; one that works is too slow, see --when-overloaded",
        ),
        ("--media-timeout-s", 20, "longest download of one item"),
        ("--cool-down-s", 5, "rest of an engine that failed"),
        (
            "--drain-s",
            25,
            "longest time for the requests in flight to end after SIGTERM or SIGINT; a second "
            "signal ends them at once",
        ),
    ):
        say(name, metavar="SECONDS", type=_positive, default=default_s, help=purpose)
    say(
        "--balance",
        choices=("affinity", "load"),
        default="affinity",
        help="how engines are chosen; affinity: conversations and media return to the engines that "
        "may still have them in their caches, unless those have far more to do than others; load: "
        "always the engine with the least outstanding work, in tokens and media",
    )
    for stage, consequence in (
        ("encode", "one beyond it: see --when-overloaded"),
        ("prefill", "one beyond it: see --when-overloaded"),
        ("decode", "one beyond it is answered 429 before any engine is asked"),
    ):
        say(
            f"--max-{stage}s",
            metavar="N",
            type=_natural,
            default=0,
            help=f"most requests in the {stage} stage, for each of its engines that is up and "
            "serves their model; "
            f"{consequence}; 0: no limit",
        )
    say(
        "--adapter-encoders",
        choices=("listed", "base"),
        default="listed",
        help="which encode engines get the media of a request for a LoRA adapter; listed: those "
        "that list the adapter, so without one P and D encode; base: also those that list its "
        "base model, under that name, so that a picture is encoded once for all adapters; right "
        "unless engines run with --enable-tower-connector-lora",
    )
    say(
        "--when-overloaded",
        choices=("refuse", "decode"),
        default="refuse",
        help="what happens to a request whose encode or prefill engines have too much to do: there "
        "are as many requests as --max-encodes or --max-prefills allows, or they answer 429, or "
        "they work but take longer than --stage-timeout-s; refuse: it is answered 429; "
        "decode: decode does it all, which may overload decode as well",
    )
    say(
        "--retry-share",
        metavar="SHARE",
        type=_share,
        default=0.2,
        help="most requests, as a share of all, that are sent to another engine of the same stage "
        "after one has failed them; 100 at once and one a second are allowed besides; 0: none",
    )
    say(
        "--status-key",
        metavar="KEY",
        type=_secret,
        default=None,
        help="a key, as env:NAME or file:PATH; whoever sends it to /health or /status, as "
        "Authorization: Bearer KEY, is told where the engines are and what they do; /metrics then "
        "asks for it too",
    )
    say(
        "--admin-port",
        metavar="PORT",
        type=_port,
        default=None,
        help="a port of its own where operators list, add, drain and remove engines while the "
        "router runs; it needs --admin-key",
    )
    say(
        "--admin-host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="address on which --admin-port listens",
    )
    say(
        "--admin-key",
        metavar="KEY",
        type=_secret,
        default=None,
        help="a key, as env:NAME or file:PATH; whoever sends it to --admin-port, as "
        "Authorization: Bearer KEY, may change which engines there are",
    )
    say("--access-log", action="store_true", help="log one line per request")
    say(
        "--router-key",
        metavar="KEY",
        type=_router_token,
        default=_NO_KEY,
        help="key that this router shares with engines behind a RouterGate, as env:NAME or "
        "file:/path: 32 random bytes or more",
    )
    return parser


def _engine(text: str) -> str:
    try:
        return engine_url(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _duplicate_url(options: argparse.Namespace) -> str | None:
    """Return an error message if an engine is given twice, else None."""
    twice = repeated_url({name: getattr(options, name) for name in _ENGINES})
    return twice and (
        f"argument --{twice.group}: {twice.url} is already given as --{twice.earlier_group}; name "
        "each engine once, and leave out the stages that have none of their own"
    )


def _from_file(options: argparse.Namespace) -> Urls:
    """Return the engines of --engines.

    Raises:
        ConfigError: the file is not usable, or other engines are given besides.
    """
    if any(getattr(options, name) for name in _ENGINES):
        raise ConfigError("argument --engines: the file names all engines; give no others")
    try:
        return read_engines(options.engines).urls
    except ConfigError as exc:
        raise ConfigError(f"argument --engines: {exc}") from exc


def _engine_urls(options: argparse.Namespace) -> Urls:
    """Return the engines of each stage.

    Raises:
        ConfigError: they are not usable; says why.
    """
    if options.engines is not None:
        return _from_file(options)
    if not options.decoder:
        raise ConfigError("the following arguments are required: --decoder, or --engines")
    if twice := _duplicate_url(options):
        raise ConfigError(twice)
    return {stage: tuple(getattr(options, name)) for name, stage in _ENGINES.items()}


def _admin(options: argparse.Namespace) -> AdminConfig | None:
    """Return the operator's port, None if there is none.

    Raises:
        ConfigError: it would have no key, or the key no port.
    """
    if options.admin_port is None:
        if options.admin_key is not None:
            raise ConfigError("argument --admin-key: it is for --admin-port, which is not given")
        return None
    if options.admin_key is None:
        raise ConfigError("argument --admin-port: it needs --admin-key env:NAME or file:PATH")
    return AdminConfig(options.admin_host, options.admin_port, options.admin_key)


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a network like 10.0.0.0/8 or fd00::/8, or one address"
        ) from exc


def _secret(text: str) -> Secret:
    try:
        return read_secret(text)
    except ConfigError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _router_token(text: str) -> str:
    if text == _NO_KEY:
        return ""
    if not text.startswith(("env:", "file:")):
        # Command lines are visible to every user of this host, so the message does not repeat it.
        raise argparse.ArgumentTypeError("name the key as env:NAME or file:/path")
    try:
        return router_token(read_key(text, "the key"))
    except ConfigError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _store(text: str) -> StoreConfig:
    try:
        options = msgspec.json.decode(text) if text.startswith("{") else {"url": text}
        return parse(StoreConfig, options, "the store")
    except msgspec.DecodeError as exc:
        raise argparse.ArgumentTypeError(f"the store's options are no JSON: {exc}") from exc
    except ConfigError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0 and below 1e9")
    return number


def _share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 to 1")
    return number


def _count(text: str) -> int:
    if (number := _whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return number


def _natural(text: str) -> int:
    if (number := _whole(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 0")
    return number


def _port(text: str) -> int:
    if not 1 <= (number := _whole(text)) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to 65535")
    return number


def _whole(text: str) -> int:
    """Return the number, or -1 if the text is not a whole number."""
    try:
        return int(text)
    except ValueError:
        return -1
