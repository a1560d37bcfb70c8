# SPDX-License-Identifier: Apache-2.0
"""Time honest requests beside hostile ones, whose media are on servers that never answer.

A router process is in front of an engine that computes nothing. Attackers ask for media on names
that no name server answers for, or on servers that accept connections and send nothing. They ask
again when they are refused. Meanwhile honest clients ask one after the other.

    python -m benchmarks.router_hostile

It runs in namespaces of its own (unshare -rmn): /etc/resolv.conf names its name server, and no
packet leaves the loopback device.
"""

import asyncio
import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from benchmarks.measure import percentile
from benchmarks.report import Report, Table, arguments, command_line
from ecshare.router.http.connections import raise_open_files
from lab.completions import COMPLETIONS, NEW, TEXT, Requests
from lab.http_load import LOST, Client, Message, Reply, post
from lab.servers.processes import LOOPBACK
from lab.servers.router import RouterProcess
from lab.servers.stand_in import StandIn

MODULE = "benchmarks.router_hostile"
DATA_BYTES, URL_BYTES = 1_000_000, 200_000
KINDS = (TEXT, "1 MB data: picture", "picture by address", "picture by name")
GOOD_ZONE = "good.test"
RATE_PER_S = 400
MEDIA_TIMEOUT_S = 60
"""Three times the default: silent servers hold requests for the whole measurement."""
PATIENCE_S = 60.0
AGAIN_S = 2.0
"""The router's Retry-After."""
LOOK_UP_S = 5.0
_INSIDE = "ECSHARE_ROUTER_HOSTILE_INSIDE"
_RESOLV_CONF = Path("/etc/resolv.conf")
_SET_FLAGS, _IS_UP = 0x8914, 1  # SIOCSIFFLAGS, IFF_UP
_BACKLOG = 4096


class Attack(NamedTuple):
    """Hostile requests beside the honest ones."""

    beside: str
    num_requests: int = 0
    urls_each: int = 0
    is_named: bool = False
    """Whether urls have names that no name server answers for, or addresses of silent servers."""
    is_at_once: bool = False
    """Whether honest requests begin with the attack, and not once all of it has arrived."""


def attacks(num_requests: int) -> list[Attack]:
    """Return all attacks; `num_requests` is the number of requests of the large ones."""
    each = f"{num_requests:,} requests of 8"
    return [
        Attack("nothing"),
        Attack("1 request of 64 silent names", 1, 64, is_named=True),
        Attack("16 requests of 64 silent names", 16, 64, is_named=True),
        Attack(f"{each} silent names", num_requests, 8, is_named=True),
        Attack(f"{each} silent servers", num_requests, 8),
        Attack(f"{each} silent servers, at once", num_requests, 8, is_at_once=True),
    ]


def main(words: Sequence[str]) -> None:
    """Measure, print, write the result files."""
    options = arguments(__doc__ or "", MODULE).parse_args(words)
    _enter(words)
    raise_open_files()
    readings = options.rounds or (2 if options.quick else 30)
    num_requests = 16 if options.quick else 2_400
    settings = {"readings": readings, "media timeout s": MEDIA_TIMEOUT_S}
    report = Report("router_hostile", command_line(MODULE, options), settings)
    with tempfile.TemporaryDirectory(dir=options.disk) as name:
        folder = Path(name)
        _become_name_server(folder)
        with StandIn("engine", folder, "decode") as engine:
            measured = _measure(folder, engine, attacks(num_requests), readings)
            report.add(asyncio.run(measured))
    print(f"\nwritten: {report.write(options.results).name}")


# --- a network of its own ---


def _enter(words: Sequence[str]) -> None:
    """Continue in namespaces of its own, as their root.

    Raises:
        SystemExit: the system does not allow it.
    """
    if _INSIDE in os.environ:
        return
    own = ("unshare", "-rmn")
    try:
        tried = subprocess.run([*own, "true"], capture_output=True, text=True, check=False)
        reason = tried.stderr.strip() if tried.returncode else ""
    except FileNotFoundError:
        reason = "there is no such program"
    if reason:
        raise SystemExit(
            f"{MODULE} needs a network and an /etc/resolv.conf of its own, and `{' '.join(own)}` "
            f"fails here: {reason}. Run it where user namespaces are allowed, or as root."
        )
    os.environ[_INSIDE] = "1"
    os.execvp(own[0], [*own, sys.executable, "-m", MODULE, *words])


def _become_name_server(folder: Path) -> None:
    """Switch the loopback device on, and have names resolved on it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh22x", b"lo", _IS_UP))
    own = folder / "resolv.conf"
    own.write_text(f"nameserver {LOOPBACK}\n")
    subprocess.run(["mount", "--bind", str(own), str(_RESOLV_CONF.resolve())], check=True)


class NameServer(asyncio.DatagramProtocol):
    """Answers for all names of one zone, and is silent about any other."""

    def __init__(self) -> None:
        self._asked_s: dict[bytes, float] = {}
        """The time of the first question for each silent name."""

    def num_held(self) -> int:
        """Return the number of silent names that the router may still wait for."""
        since_s = time.monotonic() - LOOK_UP_S
        return sum(asked_s > since_s for asked_s in self._asked_s.values())

    def clear(self) -> None:
        """Drop the record of questions."""
        self._asked_s.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Take a question."""
        end = data.index(0, 12) + 5
        question, is_ipv4 = data[12:end], data[end - 4 : end - 2] == b"\0\1"
        zone = b"".join(bytes((len(part),)) + part.encode() for part in GOOD_ZONE.split("."))
        if not question[:-5].lower().endswith(zone):
            self._asked_s.setdefault(question[:-4], time.monotonic())
            return
        record = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + socket.inet_aton(LOOPBACK)
        head = data[:2] + b"\x81\x80\0\1" + (b"\0\1" if is_ipv4 else b"\0\0") + bytes(4)
        self._transport.sendto(head + question + (record if is_ipv4 else b""), addr)


class Pictures(asyncio.Protocol):
    """A media server that answers every request with a picture."""

    _ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n%b"
    answer = _ANSWER % (URL_BYTES, bytes(URL_BYTES))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._head = b""

    def data_received(self, data: bytes) -> None:
        """Take a piece of a request."""
        self._head += data
        if self._head.endswith(b"\r\n\r\n"):
            self._head = b""
            self._transport.write(self.answer)


class Silent(asyncio.Protocol):
    """A media server that never answers."""

    def __init__(self, held: set["Silent"]) -> None:
        self._held = held

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection."""
        self._held.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        self._held.discard(self)


@dataclass
class Network:
    """All that the router can reach besides its engine."""

    names: NameServer
    good_port: int
    silent_port: int
    held: set[Silent]
    _number: int = field(default=0)

    def held_by(self, attack: Attack) -> int:
        """Return the number of connections, or names, that the router waits for."""
        return self.names.num_held() if attack.is_named else len(self.held)

    def bad_urls(self, attack: Attack) -> list[str]:
        """Return urls for one request. Each has a host of its own."""
        self._number += attack.urls_each
        numbers = range(self._number - attack.urls_each, self._number)
        if attack.is_named:
            return [f"http://h.x{n}.test/a" for n in numbers]
        # All of 127.0.0.0/8 is this host; the first is the good server's.
        hosts = (f"127.{1 + n // 40_000 % 250}.{n // 200 % 200}.{1 + n % 200}" for n in numbers)
        return [
            f"http://{host}:{self.silent_port}/{n}" for host, n in zip(hosts, numbers, strict=True)
        ]

    def good_url(self, kind: str) -> str:
        """Return a url that was never asked for."""
        self._number += 1
        host = LOOPBACK if kind == KINDS[2] else f"h{self._number}.{GOOD_ZONE}"
        return f"http://{host}:{self.good_port}/{self._number}"


@asynccontextmanager
async def _network() -> AsyncIterator[Network]:
    loop, held = asyncio.get_running_loop(), set[Silent]()
    asked, names = await loop.create_datagram_endpoint(NameServer, local_addr=(LOOPBACK, 53))
    good = await loop.create_server(Pictures, LOOPBACK, 0)
    silent = await loop.create_server(lambda: Silent(held), "0.0.0.0", 0, backlog=_BACKLOG)
    good_port, silent_port = (each.sockets[0].getsockname()[1] for each in (good, silent))
    try:
        yield Network(names, good_port, silent_port, held)
    finally:
        asked.close()
        good.close()
        silent.close()


# --- requests ---


def _with_pictures(urls: Sequence[str]) -> Message:
    shown = [b',{"type":"image_url","image_url":{"url":"%b"}}' % url.encode() for url in urls]
    return post(
        COMPLETIONS,
        b'{"model":"stand-in","messages":[{"role":"user","content":[{"type":"text","text":"?"}',
        *shown,
        b"]}]}",
    )


async def _attacker(client: Client, network: Network, attack: Attack, begins_s: float) -> None:
    """Ask again and again, as long as the router runs."""
    await asyncio.sleep(begins_s)
    while (await client.ask(_with_pictures(network.bad_urls(attack)))).status:
        await asyncio.sleep(AGAIN_S)


async def _until_it_holds(network: Network, attack: Attack) -> None:
    """Wait until the attack holds no more connections or names than a second before."""
    before, now = -1, 0
    while now > before:
        await asyncio.sleep(1.0)
        before, now = now, network.held_by(attack)


async def _honest(client: Client, message: Message) -> Reply:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await client.ask(message)
    except TimeoutError:
        return LOST


async def _replies(client: Client, network: Network, readings: int) -> dict[str, list[Reply]]:
    """Ask for one url of each kind at a time, `readings` times."""
    replies: dict[str, list[Reply]] = {kind: [] for kind in KINDS}
    requests = Requests(DATA_BYTES)
    makers: list[Callable[[], Message]] = [
        lambda: requests.next(TEXT),
        lambda: requests.next(NEW),
        lambda: _with_pictures([network.good_url(KINDS[2])]),
        lambda: _with_pictures([network.good_url(KINDS[3])]),
    ]
    for _ in range(readings):
        got = await asyncio.gather(*(_honest(client, make()) for make in makers))
        for kind, reply in zip(KINDS, got, strict=True):
            replies[kind].append(reply)
        await asyncio.sleep(0.1)
    return replies


# --- the table ---


async def _measure(
    folder: Path, engine: StandIn, planned: Sequence[Attack], readings: int
) -> Table:
    table = Table(
        "Honest requests beside hostile ones",
        ("beside", "request", "p50 s", "max s", "not 200", "held before", "held after"),
        "Seconds from a request's first byte to its answer's last, of those answered 200. Pictures "
        f"by url have {URL_BYTES:,} bytes; no two are the same. Four honest clients, one of each "
        "kind, ask at a time. `held`: connections that are open at silent servers, or silent names "
        f"asked for in the last {LOOK_UP_S:g} s, before the first honest request and after the "
        f"last. Attackers come {RATE_PER_S} a second, and ask again {AGAIN_S:g} s after each "
        "answer. `at once`: they come together, with the first honest request.",
    )
    options = (f"--media-timeout-s={MEDIA_TIMEOUT_S}", "--allow-media-network=127.0.0.0/8")
    async with _network() as network:
        for attack in planned:
            network.names.clear()
            with RouterProcess("router", folder, {"decoder": [engine]}, options) as router:
                for row in await _beside(attack, router, network, readings):
                    table.add(attack.beside, *row)
    return table


async def _beside(
    attack: Attack, router: RouterProcess, network: Network, readings: int
) -> list[tuple[str, float | None, float | None, int, int, int]]:
    port = router.port.number
    honest, hostile = Client(port), Client(port)
    await _replies(honest, network, 1)  # warms up
    gap_s = 0.0 if attack.is_at_once else 1 / RATE_PER_S
    attackers = [
        asyncio.create_task(_attacker(hostile, network, attack, gap_s * number))
        for number in range(attack.num_requests)
    ]
    if attackers and not attack.is_at_once:
        await _until_it_holds(network, attack)
    before = network.held_by(attack)
    replies = await _replies(honest, network, readings)
    after = network.held_by(attack)
    for attacker in attackers:
        attacker.cancel()
    await asyncio.gather(*attackers, return_exceptions=True)
    honest.close()
    rows = []
    for kind, those in replies.items():
        taken = [reply.end_s for reply in those if reply.status == 200]
        figures = (percentile(taken, 50), max(taken)) if taken else (None, None)
        rows.append((kind, *figures, len(those) - len(taken), before, after))
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
