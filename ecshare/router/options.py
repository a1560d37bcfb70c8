# SPDX-License-Identifier: Apache-2.0
"""The options of the router's command line. docs/config.md is generated from them."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ecshare import __version__
from ecshare.router.argument_types import (
    collector,
    count,
    engine,
    header,
    key,
    mebibytes,
    natural,
    network,
    origin,
    port,
    positive,
    share,
    store,
    token,
)


class Option(NamedTuple):
    """One option, and its texts for --help."""

    flag: str
    help: str
    metavar: str | None = None
    read: Callable[[str], Any] | None = None
    """Makes a value of an argument, which is the text itself if this is None."""
    default: str | None = None
    """As a user would give it."""
    choices: tuple[str, ...] | None = None
    field: str = ""
    """The field of the result; empty: it is called like the option."""
    if_none: str = ""
    """It may be given several times; what it means to give none."""
    is_switch: bool = False
    """It takes no argument, and is off if it is not given."""

    def add_to(self, parser: Any) -> None:
        """Add it to an argparse parser, or to a group of one."""
        about: dict[str, Any] = {"help": self.help}
        if self.field:
            about["dest"] = self.field
        if self.is_switch:
            parser.add_argument(self.flag, action="store_true", **about)
            return
        default: Any = self.default
        if self.if_none:
            about["action"], default = "append", _Repeated(self.if_none)
        parser.add_argument(
            self.flag,
            type=self.read,
            metavar=self.metavar,
            choices=self.choices,
            default=default,
            **about,
        )


class _Repeated(list[str]):
    """The empty default of a repeatable option; its text explains what the default means."""

    def __init__(self, meaning: str) -> None:
        super().__init__()
        self._meaning = meaning

    def __str__(self) -> str:
        return self._meaning


ENGINES = (
    Option(
        "--encoder",
        "encode engine; without one the prefill engines are sent the pictures",
        "URL",
        engine,
        field="encoders",
        if_none="none",
    ),
    Option(
        "--prefiller",
        "prefill engine; without one the decode engines prefill",
        "URL",
        engine,
        field="prefillers",
        if_none="none",
    ),
    Option(
        "--decoder",
        "decode engine; dns+http://decode.example:8003 stands for all addresses of that name, "
        "for each stage; they are looked up every few seconds",
        "URL",
        engine,
        field="decoders",
        if_none="required, or --engines",
    ),
    Option(
        "--engines",
        "a JSON file of the lists encoders, prefillers and decoders, instead of the above; an "
        "entry is a url, or an object of url and models: an engine that is used for these "
        "models alone, whatever else it lists; the file is read every few seconds: engines that "
        "are new get requests, and engines that are gone only finish those that they have; a "
        "file that is wrong changes nothing",
        "FILE",
        Path,
        field="engines_file",
    ),
)
"""What says which engines there are."""

OPTIONS = (
    Option("--host", "address to listen on", "ADDRESS", default="127.0.0.1"),
    Option("--port", "port to listen on", "PORT", port, default="8000"),
    Option(
        "--max-body-mb",
        "largest request body",
        "MIB",
        mebibytes,
        field="max_body_bytes",
        default="128",
    ),
    Option(
        "--max-media-mb",
        "most media to download for one request",
        "MIB",
        mebibytes,
        field="max_media_bytes",
        default="128",
    ),
    Option(
        "--max-in-flight-mb",
        "most memory for all requests in flight, with the media that are downloaded for them; a "
        "request beyond it is answered 429; an eighth of it is for requests of up to 1 MiB "
        "alone",
        "MIB",
        mebibytes,
        field="max_in_flight_bytes",
        default="2048",
    ),
    Option(
        "--max-index-mb",
        "most memory for what encode engines have reported, by which they are asked once for a "
        "picture; as much again for the prompts that are stored; one takes about 600 bytes",
        "MIB",
        mebibytes,
        field="max_index_bytes",
        default="128",
    ),
    Option(
        "--prefill",
        "whether prefill engines are asked for prompts that they have stored, or only for "
        "others; decode engines must be kv_both or kv_consumer, and compute what is lost",
        choices=("needed", "always"),
        default="needed",
    ),
    Option(
        "--max-new-tokens",
        "most tokens that decode computes itself behind a prompt that is stored, such as the "
        "next question of a conversation; of text that is new they are estimated, one for four "
        "characters; decode's own answers do not count; 0: only prompts that are stored whole go "
        "past prefill",
        "N",
        natural,
        default="250",
    ),
    Option(
        "--store",
        "where routers of one fleet share what encode engines have reported: a url, or a JSON "
        "object of url, storage_options, folder_access, epoch, io_timeout_s and integrity_key, "
        "which mean what they mean for connectors",
        "URL",
        store,
    ),
    Option("--max-items", "most media items in one request", "N", count, default="64"),
    Option(
        "--max-connections",
        "most connections of clients, or a quarter of the open files that the process may have "
        "(ulimit -n) where that is less; one beyond it takes the place of one that has sent no "
        "request yet, or is answered 503 and closed; as many downloads of media may be under way",
        "N",
        count,
        default="4096",
    ),
    Option(
        "--hand-over",
        "when decode gets its request: while a free prefill engine computes, so that it loads "
        "what is there already, or always after",
        choices=("streamed", "after"),
        default="streamed",
    ),
    Option(
        "--allow-media-domain",
        "fetch media from this host only; may be given several times",
        "HOST",
        str.lower,
        field="allow_media_domains",
        if_none="all public hosts",
    ),
    Option(
        "--allow-media-network",
        "fetch media from addresses in this network too, although it is not public; may be "
        "given several times",
        "CIDR",
        network,
        field="allow_media_networks",
        if_none="public addresses only",
    ),
    Option(
        "--media-proxy-resolves",
        "give the names of media's hosts to the proxy of HTTP_PROXY or HTTPS_PROXY instead of "
        "their addresses; for networks where only the proxy can look names up, or where it "
        "decides by names; the proxy must then refuse addresses that are not public itself",
        is_switch=True,
    ),
    Option(
        "--forward-header",
        "pass this header of clients on to engines too; may be given several times",
        "NAME",
        header,
        field="forward_headers",
        if_none="those that vLLM reads",
    ),
    Option(
        "--allow-origin",
        "let scripts of web pages from this origin (such as https://chat.example) ask, and read "
        "answers (CORS); *: from any; may be given several times",
        "ORIGIN",
        origin,
        field="allow_origins",
        if_none="none",
    ),
    Option("--timeout-s", "deadline of a whole request", "SECONDS", positive, default="600"),
    Option(
        "--client-timeout-s",
        "longest wait for a client: for the head of its next request, for a body beyond what it "
        "takes at 64 KiB a second, and for it to read on; then its connection is closed",
        "SECONDS",
        positive,
        default="20",
    ),
    Option(
        "--first-byte-timeout-s",
        "longest wait for the first byte of a streamed answer before another decode engine is "
        "asked, if one is up; an engine that is silent for so long is left out",
        "SECONDS",
        positive,
        default="60",
    ),
    Option(
        "--stage-timeout-s",
        "longest wait for an encode or prefill engine; one that is silent to everybody for so "
        "long is left out; one that works is too slow, see --when-overloaded",
        "SECONDS",
        positive,
        default="120",
    ),
    Option("--media-timeout-s", "longest download of one item", "SECONDS", positive, default="20"),
    Option("--cool-down-s", "rest of an engine that failed", "SECONDS", positive, default="5"),
    Option(
        "--drain-s",
        "longest time for the requests in flight to end after SIGTERM or SIGINT; a second "
        "signal ends them at once",
        "SECONDS",
        positive,
        default="25",
    ),
    Option(
        "--balance",
        "how engines are chosen; affinity: conversations and media return to the engines that "
        "may still have them in their caches, unless those have far more to do than others; "
        "load: always the engine with the least outstanding work, in tokens and media",
        choices=("affinity", "load"),
        default="affinity",
    ),
    Option(
        "--max-encodes",
        "most requests in the encode stage, for each of its engines that is up and serves their "
        "model; one beyond it: see --when-overloaded; 0: no limit",
        "N",
        natural,
        default="0",
    ),
    Option(
        "--max-prefills",
        "most requests in the prefill stage, for each of its engines that is up and serves "
        "their model; one beyond it: see --when-overloaded; 0: no limit",
        "N",
        natural,
        default="0",
    ),
    Option(
        "--max-decodes",
        "most requests in the decode stage, for each of its engines that is up and serves their "
        "model; one beyond it is answered 429 before any engine is asked; 0: no limit",
        "N",
        natural,
        default="0",
    ),
    Option(
        "--adapter-encoders",
        "which encode engines get the media of a request for a LoRA adapter; listed: those that "
        "list the adapter, so without one P and D encode; base: also those that list its base "
        "model, under that name, so that a picture is encoded once for all adapters; right "
        "unless engines run with --enable-tower-connector-lora",
        choices=("listed", "base"),
        default="listed",
    ),
    Option(
        "--when-overloaded",
        "what happens to a request whose encode or prefill engines have too much to do: there "
        "are as many requests as --max-encodes or --max-prefills allows, or they answer 429, or "
        "they work but take longer than --stage-timeout-s; refuse: it is answered 429; decode: "
        "decode does it all, which may overload decode as well",
        choices=("refuse", "decode"),
        default="refuse",
    ),
    Option(
        "--retry-share",
        "most requests, as a share of all, that are sent to another engine of the same stage "
        "after one has failed them; 100 at once and one a second are allowed besides; 0: none. "
        "Retries after answers such as 500, and all others, have a share each",
        "SHARE",
        share,
        default="0.2",
    ),
    Option(
        "--status-key",
        "a key of 32 random bytes or more, as env:NAME or file:PATH; whoever sends it to /health "
        "or /status, as Authorization: Bearer KEY, is told where the engines are and what they do; "
        "/metrics then asks for it too",
        "KEY",
        key,
    ),
    Option(
        "--admin-port",
        "a port of its own where operators list, add, drain and remove engines while the router "
        "runs; it needs --admin-key",
        "PORT",
        port,
    ),
    Option("--admin-host", "address on which --admin-port listens", "ADDRESS", default="127.0.0.1"),
    Option(
        "--admin-key",
        "a key of 32 random bytes or more, as env:NAME or file:PATH; whoever sends it to "
        "--admin-port, as Authorization: Bearer KEY, may change which engines there are",
        "KEY",
        key,
    ),
    Option("--access-log", "log one line per request", is_switch=True),
    Option(
        "--otlp-traces-endpoint",
        "an OpenTelemetry collector that gets a span of each completion and of each call of an "
        "engine for it, by gRPC, or as OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says; engines that are "
        "given the same option add their own",
        "URL",
        collector,
    ),
    Option(
        "--router-key",
        "key that this router shares with engines behind a RouterGate, as env:NAME or "
        "file:/path: 32 random bytes or more",
        "KEY",
        token,
        field="router_token",
        default="none",
    ),
)
"""All other options."""


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line. Its result has a name for each field."""
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
    for option in ENGINES:
        option.add_to(engines)
    for option in OPTIONS:
        option.add_to(parser)
    return parser
