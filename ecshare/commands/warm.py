# SPDX-License-Identifier: Apache-2.0
"""`ecshare warm`: fills a store ahead of traffic, by sending a corpus to engines or to a router."""

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from ecshare.commands.arguments import Count, Number, Stores, json_option, store_option
from ecshare.commands.output import Counting, print_json, print_table
from ecshare.commands.running import FAILED, opened, run_async
from ecshare.doctor.findings import printable, readable_size
from ecshare.store.errors import ConfigError
from ecshare.store.integrity import TOKEN_HEADER, open_integrity, read_key, router_token
from ecshare.store.keys import is_namespace
from ecshare.store.secrets import is_reference, referenced

if TYPE_CHECKING:
    from ecshare.warm.run import Report, Run

F = TypeVar("F", bound=Callable[..., Any])

_MIB = 1 << 20
_START_S = 1800.0  # an engine may have to download its model
_CORPUS_HELP = (
    "CORPUS is a folder of media, a glob in quotes, a medium, a .jsonl of chat requests or "
    "completions, a .txt of urls, or a .tar of media."
)


class _Options(NamedTuple):
    """The arguments and options of the command, except those of the store."""

    corpus: Sequence[str]
    encoders: Sequence[str]
    prefillers: Sequence[str]
    servers: Sequence[str]
    kv: bool
    model: str
    namespace: str
    headers: dict[str, str]
    networks: Sequence[str]
    numbers: dict[str, Any]
    dry_run: bool
    rate: float | None
    start: str
    as_json: bool

    @property
    def urls(self) -> Sequence[str]:
        """Return the servers of the only kind that is given."""
        return self.encoders or self.prefillers or self.servers


def _servers(flag: str, words: str) -> Callable[[F], F]:
    return click.option(flag, f"{flag[2:]}s", metavar="URL", multiple=True, help=words)


@click.command(epilog=_CORPUS_HELP)
@click.argument("corpus", nargs=-1, type=click.Path())
@_servers("--encoder", "Encode engine, asked as the router asks it. May be repeated.")
@_servers("--prefiller", "Prefill engine, asked as the router asks it. May be repeated.")
@_servers("--server", "Router, or an engine that clients ask. May be repeated.")
@click.option("--kv", is_flag=True, help="Have --server prefill the requests and store their KV.")
@click.option(
    "--to-host",
    is_flag=True,
    help="Bring what was used last from --store into this host's cache, instead of sending a "
    "CORPUS.",
)
@store_option
@click.option("--namespace", metavar="HEX", default="", help="The one of --store to look into.")
@click.option("--model", metavar="NAME", default="", help="Default: the first that is served.")
@click.option("--api-key", metavar="KEY", default="", help="As env:NAME or file:/path.")
@click.option(
    "--router-key", metavar="KEY", default="", help="Of engines behind a RouterGate, as above."
)
@click.option(
    "--allow-media-network",
    "networks",
    metavar="NETWORK",
    multiple=True,
    help="Download urls for --encoder and --prefiller from there too, not only from public "
    "addresses. May be repeated.",
)
@click.option(
    "--concurrency", metavar="N", type=Count(1), default=16, show_default=True,
    help="Requests in flight.",
)  # fmt: skip
@click.option(
    "--max-media-mb", metavar="MIB", type=Number("a number of MiB above 0", 0.001, 4096),
    default=64, show_default=True, help="Largest medium.",
)  # fmt: skip
@click.option(
    "--memory-mb", metavar="MIB", type=Number("a number of MiB, 1 or more", 1, 1e6),
    default=1024, show_default=True, help="Memory for media in flight.",
)  # fmt: skip
@click.option(
    "--max-failures", metavar="N", type=Count(1), default=100, show_default=True,
    help="Stop after so many.",
)  # fmt: skip
@click.option(
    "--timeout", metavar="SECONDS", type=Number("a number of seconds above 0", 0.001, 1e6),
    default=300, show_default=True, help="For each answer.",
)  # fmt: skip
@click.option(
    "--start",
    metavar="COMMAND",
    default="",
    help="Run this first, wait until it answers at the url, and end it at the end: an engine.",
)
@click.option("--most", metavar="N", type=Count(1), help="Send at most so many, then stop.")
@click.option("--dry-run", is_flag=True, help="Send nothing; count, and look into --store.")
@click.option(
    "--rate", metavar="N", type=Number("a number above 0", 0.001), help="With --dry-run: new media "
    "a second, to estimate the time.",
)  # fmt: skip
@json_option
def command(stores: Stores | None, to_host: bool, as_json: bool, **given: Any) -> int:
    """Fill a store ahead: encode media, or prefill prompts, before requests need them.

    It may be stopped and run again: what is stored already is not computed again. With --store it
    is not even sent, where its name can be computed.

    Exit status: 0 done, 1 some failed, 2 wrong usage, 130 and 143 after SIGINT and SIGTERM.
    """
    if to_host:
        if stores is None or given["corpus"]:
            raise ConfigError("--to-host: say --store, and no corpus")
        return run_async(_fill(stores, given["namespace"], as_json=as_json))
    if not given["corpus"]:
        raise ConfigError("warm: name a CORPUS, or say --to-host")
    try:
        import ecshare.warm.run  # noqa: F401 — says which package is missing
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"warm: {exc}: install ecshare with its extras [router] and [cli] (pip install "
            "aiohttp httptools multidict prometheus_client pybase64 pycares yarl numpy rich)"
        ) from exc
    from ecshare.warm.corpus import check_corpus

    options = _read_options(as_json, given)
    check_corpus(options.corpus)
    return run_async(_warm(options, stores))


async def _fill(stores: Stores, namespace: str, *, as_json: bool) -> int:
    """Fill this host's cache, and print the outcomes."""
    from ecshare.store.hostcache.cache import open_host_cache
    from ecshare.upkeep.hot import Brought, bring, used_last

    if namespace and not is_namespace(namespace):
        raise ConfigError(f"--namespace: {namespace!r} is not 32 hex digits")
    (target, *_) = stores.distinct()
    config, path = target
    host, integrity = open_host_cache(config), open_integrity(config, path)
    counts, num_bytes = dict.fromkeys(Brought, 0), dict.fromkeys(Brought, 0)
    try:
        async with opened(target) as store:
            keys = await used_last(
                store,
                host.limit_bytes,
                namespace=namespace,
                integrity=integrity,
                timeout_s=config.call_timeout_s,
            )
            with Counting("objects done", len(keys), is_shown=not as_json) as counting:
                for key in keys:
                    async with asyncio.timeout(config.call_timeout_s):
                        brought, size = await bring(store, host, key, integrity)
                    counts[brought] += 1
                    num_bytes[brought] += size
                    counting.advance()
                    if brought is Brought.FULL:
                        break
    except TimeoutError as exc:
        raise click.ClickException("warm: the store does not answer; run it again") from exc
    finally:
        if as_json:
            print_json({"host": str(host.root), "objects": counts, "bytes": num_bytes})
        else:
            rows = [
                (name, f"{number:,}", readable_size(num_bytes[name]))
                for name, number in counts.items()
                if number
            ]
            print_table((printable(str(host.root)), "objects", "size"), rows, 1)
    return 0


def _read_options(as_json: bool, given: dict[str, Any]) -> _Options:
    """Return the options; removes some from `given`.

    Raises:
        ConfigError: options contradict each other, or one is wrong.
    """
    from ecshare.router.options.engines import BY_NAME, engine_url

    kinds = {name: given.pop(name) for name in ("encoders", "prefillers", "servers")}
    named = [name for name, urls in kinds.items() if urls]
    if len(named) > 1 or not (named or given["dry_run"]):
        raise ConfigError("warm: say one of --encoder, --prefiller and --server")
    if given["kv"] and kinds["encoders"]:
        raise ConfigError("--kv: an encode engine stores no KV; say --prefiller or --server")
    for name, urls in kinds.items():
        try:
            if any(url.startswith(BY_NAME) for url in urls):
                raise ValueError(f"{BY_NAME} is for the router; name the engines")  # noqa: TRY301
            kinds[name] = [engine_url(url) for url in urls]
        except ValueError as exc:
            raise ConfigError(f"--{name[:-1]}: {exc}") from exc
    numbers = ("concurrency", "max_media_mb", "memory_mb", "max_failures", "timeout", "most")
    headers = _headers(given.pop("api_key"), given.pop("router_key"))
    return _Options(
        numbers={name: given.pop(name) for name in numbers},
        headers=headers,
        as_json=as_json,
        **kinds,
        **given,
    )


def _headers(api_key: str, router_key: str) -> dict[str, str]:
    headers = {}
    if api_key:
        if not is_reference(api_key):
            raise ConfigError("--api-key is given as env:NAME or file:/path")
        key = referenced(api_key, "--api-key").decode("latin-1").strip()
        if not key.isprintable() or not key:
            raise ConfigError(f"--api-key: {api_key} is empty, or holds control characters")
        headers["Authorization"] = f"Bearer {key}"
    if router_key:
        headers[TOKEN_HEADER] = router_token(read_key(router_key, "--router-key", in_public=True))
    return headers


async def _warm(options: _Options, stores: Stores | None) -> int:
    from ecshare.warm.child import running
    from ecshare.warm.client import Client
    from ecshare.warm.corpus import WarmError, samples

    numbers = options.numbers
    async with AsyncExitStack() as stack:
        client = None
        model = options.model
        if not options.dry_run:
            client = await stack.enter_async_context(
                Client(options.urls, options.headers, numbers["timeout"], numbers["concurrency"])
            )
            try:
                if options.start:
                    await stack.enter_async_context(running(options.start, client.model, _START_S))
                model = model or await client.model()
            except WarmError as exc:
                raise click.ClickException(f"warm: {printable(str(exc))}") from exc
        run = _run(options, client, model)
        if stores is not None:
            await _look_up(run, stores, model, options.namespace)
        corpus = samples(options.corpus, int(numbers["max_media_mb"] * _MIB))
        try:
            with Counting("samples done", is_shown=not options.as_json) as counting:
                await run.send_all(corpus, counting.advance)
        finally:
            _show(run.report, options)
    return FAILED if run.report.counts["failed"] else 0  # type: ignore[index]


def _run(options: _Options, client: Any, model: str) -> "Run":
    from ecshare.router.options.config import RouterConfig
    from ecshare.warm.run import Limits, Run
    from ecshare.warm.server_kinds import ChatServer, EncodeEngine, PrefillEngine, ServerKind

    try:
        networks = tuple(ipaddress.ip_network(text) for text in options.networks)
    except ValueError as exc:
        raise ConfigError(f"--allow-media-network: {exc}") from exc
    kind: ServerKind
    if options.prefillers:
        kind = PrefillEngine()
    elif options.servers and client is not None:
        kind = ChatServer(kv=options.kv)
    else:  # --dry-run names media even without a server
        kind = PrefillEngine() if options.kv else EncodeEngine()
    numbers = options.numbers
    limits = Limits(
        concurrency=numbers["concurrency"],
        memory_bytes=int(numbers["memory_mb"] * _MIB),
        max_bytes=int(numbers["max_media_mb"] * _MIB),
        max_failures=numbers["max_failures"],
        most=numbers["most"],
    )
    config = RouterConfig(
        decoders=(), allow_media_networks=networks, max_media_bytes=limits.max_bytes
    )
    return Run(kind, client, model, limits, config)


async def _look_up(run: "Run", stores: Stores, model: str, namespace: str) -> None:
    """List in `run.stored` the embeddings that the store has."""
    from ecshare.warm.stored import find_namespace, list_stored

    (target, *_) = stores.distinct()
    async with opened(target) as store:
        found = await find_namespace(store, model, namespace)
        if found is not None:
            width = found.facts.get("encoder_width")
            run.stored = await list_stored(store, found.namespace, width)


def _show(report: "Report", options: _Options) -> None:
    sent = report.counts["new"]  # type: ignore[index]
    rate = sent / report.seconds if report.seconds and not options.dry_run else options.rate
    left_s = sent / options.rate if options.dry_run and options.rate else None
    if options.as_json:
        print_json(
            {
                "dry_run": options.dry_run,
                "samples": report.counts,
                "bytes": report.num_bytes,
                "seconds": round(report.seconds, 3) if left_s is None else round(left_s, 3),
                "new_a_second": rate,
                "stopped": report.stopped,
                "failures": [{"where": at, "reason": why} for at, why in report.failures],
            }
        )
        return
    rows = [
        (f"to send ({name})" if options.dry_run and name == "new" else name,
         f"{number:,}", readable_size(report.num_bytes[name]))
        for name, number in report.counts.items()
        if number
    ]  # fmt: skip
    print_table(("outcome", "samples", "size"), rows, 1)
    for where, reason in report.failures:
        click.echo(f"{printable(where)}: {printable(reason)}", err=True)
    more = report.counts["failed"] - len(report.failures)  # type: ignore[index]
    if more > 0:
        click.echo(f"and {more:,} more failures", err=True)
    if report.stopped:
        click.echo(f"ecshare warm: stopped: {report.stopped}; run it again to go on", err=True)
    if left_s is not None:
        click.echo(f"about {left_s / 60:,.1f} min at {options.rate:,g} a second")
    elif not options.dry_run:
        click.echo(f"{report.seconds:,.1f} s, {rate or 0.0:,.1f} new a second")
