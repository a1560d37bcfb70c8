# SPDX-License-Identifier: Apache-2.0
"""The router's options: one class, from which the command line, the environment, files and
docs/config.md are made."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from ecshare.router.options import values as read
from ecshare.router.options.engines import engine_url
from ecshare.router.options.values import MIB, Network, Secret
from ecshare.store.errors import ConfigError

_DIVIDED = ("max_in_flight_bytes", "max_connections")
_LIMITS = ("max_encodes", "max_prefills", "max_decodes")


class Option(NamedTuple):
    """How users give a field. Tuples may be given several times; booleans are switches."""

    flag: str
    metavar: str | None = None
    read: Callable[[str], Any] = str
    """Makes the value of what the user gives as text."""
    if_none: str = ""
    """What the default means, if it is not clear from its value."""


class RouterConfig(Struct, frozen=True, kw_only=True):
    """All that an operator can set. Urls have the form that `engine_url` returns."""

    encoders: Annotated[tuple[str, ...], Option("--encoder", "URL", engine_url)] = ()
    """Encode engine; without one the prefill engines are sent the pictures."""

    prefillers: Annotated[tuple[str, ...], Option("--prefiller", "URL", engine_url)] = ()
    """Prefill engine; without one the decode engines prefill."""

    decoders: Annotated[
        tuple[str, ...], Option("--decoder", "URL", engine_url, if_none="required, or --engines")
    ]
    """Decode engine; dns+http://decode.example:8003 stands for all addresses of that name, for
    each stage; they are looked up every few seconds."""

    engines_file: Annotated[Path | None, Option("--engines", "FILE", Path)] = None
    """A JSON file of the lists encoders, prefillers and decoders, instead of the above; an
    entry is a url, or an object of url and models: an engine that is used for these models
    alone, whatever else it lists; the file is read every few seconds: engines that are new get
    requests, and engines that are gone only finish those that they have; a file that is wrong
    changes nothing."""

    host: Annotated[str, Option("--host", "ADDRESS")] = "127.0.0.1"
    """Address to listen on."""

    port: Annotated[int, Option("--port", "PORT", read.port)] = 8000
    """Port to listen on."""

    workers: Annotated[int, Option("--workers", "N", read.workers)] = 1
    """Processes that serve the port together, each up to one core; they tell each other what they
    remember of media and prompts, each has its own --max-index-mb, and all share the other limits;
    one that dies is started again."""

    max_body_bytes: Annotated[int, Option("--max-body-mb", "MIB", read.mebibytes)] = 128 * MIB
    """Largest request body."""

    max_media_bytes: Annotated[int, Option("--max-media-mb", "MIB", read.mebibytes)] = 128 * MIB
    """Most media to download for one request."""

    max_in_flight_bytes: Annotated[int, Option("--max-in-flight-mb", "MIB", read.mebibytes)] = (
        2048 * MIB
    )
    """Most memory for all requests in flight, with the media that are downloaded for them; a
    request beyond it is answered 429; an eighth of it is for requests of up to 1 MiB alone."""

    max_index_bytes: Annotated[int, Option("--max-index-mb", "MIB", read.mebibytes)] = 128 * MIB
    """Most memory for what encode engines have reported, by which they are asked once for a
    picture; as much again for the prompts that are stored; one takes about 600 bytes."""

    prefill: Annotated[Literal["needed", "always"], Option("--prefill")] = "needed"
    """Whether prefill engines are asked for prompts that they have stored, or only for others;
    decode engines must be kv_both or kv_consumer, and compute what is lost."""

    max_new_tokens: Annotated[int, Option("--max-new-tokens", "N", read.natural)] = 250
    """Most tokens that decode computes itself behind a prompt that is stored, such as the next
    question of a conversation; of text that is new they are estimated, one for four characters;
    decode's own answers do not count; 0: only prompts that are stored whole go past prefill."""

    max_items: Annotated[int, Option("--max-items", "N", read.count)] = 64
    """Most media items in one request."""

    max_connections: Annotated[int, Option("--max-connections", "N", read.count)] = 4096
    """Most connections of clients, or a quarter of the open files that the process may have
    (ulimit -n) where that is less; one beyond it takes the place of one that has sent no
    request yet, or is answered 503 and closed; as many downloads of media may be under way."""

    hand_over: Annotated[Literal["streamed", "after", "direct"], Option("--hand-over")] = "streamed"
    """How decode gets KV. `streamed`: from the store, and that of prompts of about 4,096 tokens or
    more while a free prefill engine computes, so that it loads what is there already. `after`:
    from the store, always after. `direct`: after, from the prefill engine by a connector beside
    ours, such as NIXL's."""

    allow_media_domains: Annotated[
        tuple[str, ...],
        Option("--allow-media-domain", "HOST", str.lower, if_none="all public hosts"),
    ] = ()
    """Fetch media from this host only; may be given several times."""

    allow_media_networks: Annotated[
        tuple[Network, ...],
        Option("--allow-media-network", "CIDR", read.network, if_none="public addresses only"),
    ] = ()
    """Fetch media from addresses in this network too, although it is not public; may be given
    several times."""

    media_proxy_resolves: Annotated[bool, Option("--media-proxy-resolves")] = False
    """Give the names of media's hosts to the proxy of HTTP_PROXY or HTTPS_PROXY instead of
    their addresses; for networks where only the proxy can look names up, or where it decides by
    names; the proxy must then refuse addresses that are not public itself."""

    forward_headers: Annotated[
        tuple[str, ...],
        Option("--forward-header", "NAME", read.header, if_none="those that vLLM reads"),
    ] = ()
    """Pass this header of clients on to engines too; may be given several times."""

    allow_origins: Annotated[tuple[str, ...], Option("--allow-origin", "ORIGIN", read.origin)] = ()
    """Let scripts of web pages from this origin (such as https://chat.example) ask, and read
    answers (CORS); *: from any; may be given several times."""

    timeout_s: Annotated[float, Option("--timeout-s", "SECONDS", read.positive)] = 600.0
    """Deadline of a whole request."""

    client_timeout_s: Annotated[float, Option("--client-timeout-s", "SECONDS", read.positive)] = (
        20.0
    )
    """Longest wait for a client: for the head of its next request, for a body beyond what it
    takes at 64 KiB a second, and for it to read on; then its connection is closed."""

    first_byte_timeout_s: Annotated[
        float, Option("--first-byte-timeout-s", "SECONDS", read.positive)
    ] = 60.0
    """Longest wait for the first byte of a streamed answer before another decode engine is
    asked, if one is up; an engine that is silent for so long is left out."""

    stage_timeout_s: Annotated[float, Option("--stage-timeout-s", "SECONDS", read.positive)] = 120.0
    """Longest wait for an encode or prefill engine; one that is silent to everybody for so long
    is left out; one that works is too slow, see --when-overloaded."""

    media_timeout_s: Annotated[float, Option("--media-timeout-s", "SECONDS", read.positive)] = 20.0
    """Longest download of one item."""

    cool_down_s: Annotated[float, Option("--cool-down-s", "SECONDS", read.positive)] = 5.0
    """Rest of an engine that failed."""

    drain_s: Annotated[float, Option("--drain-s", "SECONDS", read.positive)] = 25.0
    """Longest time for the requests in flight to end after SIGTERM or SIGINT; a second signal
    ends them at once."""

    balance: Annotated[Literal["affinity", "load"], Option("--balance")] = "affinity"
    """How engines are chosen; affinity: conversations and media return to the engines that may
    still have them in their caches, unless those have far more to do than others; load: always
    the engine with the least outstanding work, in tokens and media."""

    max_encodes: Annotated[int, Option("--max-encodes", "N", read.natural)] = 0
    """Most requests in the encode stage, for each of its engines that is up and serves their
    model; one beyond it: see --when-overloaded; 0: no limit."""

    max_prefills: Annotated[int, Option("--max-prefills", "N", read.natural)] = 0
    """Most requests in the prefill stage, for each of its engines that is up and serves their
    model; one beyond it: see --when-overloaded; 0: no limit."""

    max_decodes: Annotated[int, Option("--max-decodes", "N", read.natural)] = 0
    """Most requests in the decode stage, for each of its engines that is up and serves their
    model; one beyond it is answered 429 before any engine is asked; 0: no limit."""

    adapter_encoders: Annotated[Literal["listed", "base"], Option("--adapter-encoders")] = "listed"
    """Which encode engines get the media of a request for a LoRA adapter; listed: those that
    list the adapter, so without one P and D encode; base: also those that list its base model,
    under that name, so that a picture is encoded once for all adapters; right unless engines
    run with --enable-tower-connector-lora."""

    when_overloaded: Annotated[Literal["refuse", "decode"], Option("--when-overloaded")] = "refuse"
    """What happens to a request whose encode or prefill engines have too much to do: there are
    as many requests as --max-encodes or --max-prefills allows, or they answer 429, or they work
    but take longer than --stage-timeout-s; refuse: it is answered 429; decode: decode does it
    all, which may overload decode as well."""

    retry_share: Annotated[float, Option("--retry-share", "SHARE", read.share)] = 0.2
    """Most requests, as a share of all, that are sent to another engine of the same stage after
    one has failed them; 100 at once and one a second are allowed besides; 0: none. Retries
    after answers such as 500, and all others, have a share each."""

    status_key: Annotated[Secret | None, Option("--status-key", "KEY", read.key)] = None
    """A key of 32 random bytes or more, as env:NAME or file:PATH; whoever sends it to /health
    or /status, as Authorization: Bearer KEY, is told where the engines are and what they do;
    /metrics then asks for it too."""

    access_log: Annotated[bool, Option("--access-log")] = False
    """Log one line per request."""

    otlp_traces_endpoint: Annotated[
        str | None, Option("--otlp-traces-endpoint", "URL", read.collector)
    ] = None
    """An OpenTelemetry collector that gets a span of each completion and of each call of an
    engine for it, by gRPC, or as OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says; engines that are
    given the same option add their own."""

    router_token: Annotated[str, Option("--router-key", "KEY", read.token)] = ""
    """Key that this router shares with engines behind a RouterGate, as env:NAME or file:/path:
    32 random bytes or more."""


def share_of(config: RouterConfig) -> RouterConfig:
    """Return the options of one worker: its share of what all of them may have together.

    Raises:
        ConfigError: a limit cannot be divided; names the option.
    """
    shares: dict[str, Any] = {
        name: max(1, getattr(config, name) // config.workers) for name in _DIVIDED
    }
    for name in _LIMITS:
        limit = getattr(config, name)
        if 0 < limit < config.workers:
            raise ConfigError(
                f"argument --{name.replace('_', '-')}: {limit} cannot be divided among "
                f"{config.workers} workers: give at least as many, or fewer --workers"
            )
        shares[name] = limit // config.workers
    return msgspec.structs.replace(config, **shares)
