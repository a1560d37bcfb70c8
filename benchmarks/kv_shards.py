# SPDX-License-Identifier: Apache-2.0
"""Whether ranks should read only their heads of stored chunks, or whole objects once a host.

Engines of TP size `w` have stored a prompt; one of TP size `r` loads it, its ranks on one host or
on two. Each rank is a process with a transfer engine of its own, as in vLLM. "Ranges": it reads the
header and its heads' bytes of each object. "Whole": the ranks of a host fetch each object once, and
take their heads out of the host cache's copy. From the start until the last rank has its heads in
memory of its own. Medians.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.measure import Readings, in_turn, noise
from benchmarks.places import SHM, Place
from benchmarks.report import Report, Table, arguments, command_line
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec
from ecshare.store.keys import Kind, object_key
from ecshare.store.rows import Rows
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Fetch, Outcome, Put, StoredObject, Tier
from ecshare.transfer.staging import Staging, as_tensor
from kvshare.config import OPTIONS_PATH, KVConfig
from kvshare.shards import Source, sources
from lab.faults.tcp_proxy import ProxyProcess
from lab.servers.s3 import SeaweedFS

MODULE = "benchmarks.kv_shards"
NAMESPACE = "0" * 32
NUM_HEADS = 8
NUM_PAGES = 32 * 16  # layers x blocks of a chunk: a rank's heads are so many strips of a raw one
ROUND_TRIP_S, BYTES_PER_S = 0.02, 80e6
RANGES, WHOLE = "ranges", "whole"
# Writer's and reader's TP size; where the writer's is not smaller the ranks read whole shares.
SIZES = ((1, 2), (1, 4), (1, 8), (2, 8), (4, 8))
_GIVE_UP_S = 120.0


@dataclass(frozen=True)
class Prompt:
    """What is stored: `num_chunks`, each of `chunk_bytes` for all heads together."""

    num_chunks: int
    chunk_bytes: int

    def name(self) -> str:
        """What it is called in the table."""
        return f"{self.num_chunks} x {self.chunk_bytes >> 20} MiB"

    def key(self, chunk: int, share: int, count: int) -> str:
        """Return the key of one share of `count` of a chunk."""
        name = f"{self.num_chunks} {self.chunk_bytes} {chunk}".encode()
        return object_key(Kind.KV, NAMESPACE, name, f"t{share}of{count}")

    def spec(self, count: int) -> TensorSpec:
        """Return what one share of `count` is: its heads first."""
        heads = NUM_HEADS // count
        shape = (heads, self.chunk_bytes // NUM_HEADS)
        return TensorSpec("U8", shape, {}, by_row=True)


@dataclass(frozen=True)
class Turn:
    """What one rank is to do."""

    place: Place
    host: str
    prompt: Prompt
    rank: int
    writer_size: int
    reader_size: int
    reads_ranges: bool


PROMPTS = (Prompt(1, 32 << 20), Prompt(8, 8 << 20), Prompt(32, 2 << 20))


def main(words: Sequence[str]) -> None:
    """Measure, print, write the result files."""
    options = arguments(__doc__ or "", MODULE).parse_args(words)
    rounds = options.rounds or (1 if options.quick else 5)
    sizes = SIZES[:1] if options.quick else SIZES
    settings = {
        "rounds": rounds,
        "round trip ms": 1e3 * ROUND_TRIP_S,
        "MB/s a connection": BYTES_PER_S / 1e6,
    }
    report = Report("kv_shards", command_line(MODULE, options), settings)
    with ExitStack() as stack:
        server = stack.enter_context(SeaweedFS(stack.enter_context(tempfile.TemporaryDirectory())))
        proxy = stack.enter_context(
            ProxyProcess("127.0.0.1", server.port.number, ROUND_TRIP_S, BYTES_PER_S)
        )
        near = Place("S3", f"{server.url}/shards", server.storage_options)
        place = Place("S3", near.url, {**near.storage_options, "endpoint_url": proxy.url})
        for prompt in PROMPTS:
            for size in sorted({writer for writer, _ in sizes}):
                _store(near, prompt, size)
        ranks = [stack.enter_context(_Rank()) for _ in range(max(reader for _, reader in sizes))]
        report.add(_table(place, sizes, ranks, rounds))
    print(f"\nwritten: {report.write(options.results).name}")


def _table(
    place: Place, sizes: Sequence[tuple[int, int]], ranks: "Sequence[_Rank]", rounds: int
) -> Table:
    columns = ("stored", "TP stored", "TP read", "hosts", "ranges ms", "whole ms",
               "whole / ranges", "ranges MB", "whole MB")  # fmt: skip
    table = Table("Loading chunks of another tensor-parallel size", columns)
    for prompt in PROMPTS:
        for writer, reader in sizes:
            for num_hosts in (1, 2):
                readings: Readings[tuple[str, str]] = Readings()
                for turn in range(rounds + 1):
                    for name in in_turn((RANGES, WHOLE), turn):
                        taken_s, num_bytes = _loaded(
                            place, prompt, (writer, reader), num_hosts, ranks, name == RANGES
                        )
                        if turn:
                            readings.add((name, "ms"), 1e3 * taken_s)
                            readings.add((name, "MB"), num_bytes / 1e6)
                ranges_ms, whole_ms = (readings.median((name, "ms")) for name in (RANGES, WHOLE))
                table.add(prompt.name(), writer, reader, num_hosts, ranges_ms, whole_ms,
                          whole_ms / ranges_ms, readings.median((RANGES, "MB")),
                          readings.median((WHOLE, "MB")))  # fmt: skip
    return table


def _loaded(  # noqa: PLR0913
    place: Place,
    prompt: Prompt,
    sizes: tuple[int, int],
    num_hosts: int,
    ranks: "Sequence[_Rank]",
    reads_ranges: bool,  # noqa: FBT001
) -> tuple[float, int]:
    """Return the seconds until all ranks had their heads, and the bytes read from the store."""
    writer, reader = sizes
    taking_part = ranks[:reader]
    with ExitStack() as stack:
        below = SHM if SHM.is_dir() else None
        hosts = [
            stack.enter_context(tempfile.TemporaryDirectory(dir=below)) for _ in range(num_hosts)
        ]
        for number, rank in enumerate(taking_part):
            host = str(Path(hosts[number * num_hosts // reader]) / "host")
            rank.prepare(Turn(place, host, prompt, number, writer, reader, reads_ranges))
        for rank in taking_part:
            rank.heard()
        started_s = time.perf_counter()
        for rank in taking_part:
            rank.go()
        ends = [rank.heard() for rank in taking_part]
        taken_s = time.perf_counter() - started_s
        for rank in taking_part:
            rank.go()  # all have what they want: the host cache may go
            rank.heard()
        return taken_s, sum(ends)


# --- one rank: a process ---


class _Rank:
    """A process that loads what it is told."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs,), daemon=True)

    def __enter__(self) -> "_Rank":
        self._process.start()
        self.heard()
        return self

    def __exit__(self, *exc: object) -> None:
        self._pipe.send(None)
        self._process.join()

    def prepare(self, turn: Turn) -> None:
        """Have it open the store."""
        self._pipe.send(turn)

    def go(self) -> None:
        """Have it take its next step."""
        self._pipe.send(True)

    def heard(self) -> int:
        """Wait until it has done its step, and return what it says."""
        if not self._pipe.poll(_GIVE_UP_S):
            raise TimeoutError("a rank does not answer")
        answer: int = self._pipe.recv()
        return answer


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send(0)
    while (turn := pipe.recv()) is not None:
        config = KVConfig(**turn.place.options, host_cache_dir=turn.host)
        engine = TransferEngine(config, OPTIONS_PATH)
        engine.probe(write=False)  # its connection is open, as in an engine that runs
        heads = NUM_HEADS // turn.reader_size
        content = turn.prompt.chunk_bytes // NUM_HEADS // NUM_PAGES
        own = torch.ones((turn.prompt.num_chunks, NUM_PAGES, heads, content), dtype=torch.uint8)
        pipe.send(0)
        pipe.recv()
        pipe.send(_load(engine, turn, own))
        pipe.recv()
        engine.close()
        pipe.send(0)


def _load(engine: TransferEngine, turn: Turn, own: torch.Tensor) -> int:
    """Bring this rank's heads to `own` [chunk, page, head, content]; return the bytes read."""
    found = sources(turn.rank, turn.reader_size, NUM_HEADS, turn.writer_size)
    for chunk in range(turn.prompt.num_chunks):
        for source in found:
            engine.submit(_fetch(turn, chunk, source, own[chunk]))
    num_bytes = left = 0
    left = turn.prompt.num_chunks * len(found)
    while left:
        for done in engine.poll():
            assert done.outcome is Outcome.OK, done.outcome
            num_bytes += sum(each.num_bytes for each in done.moved if each.tier is Tier.STORE)
            left -= 1
        time.sleep(0.0005)
    return num_bytes


def _fetch(turn: Turn, chunk: int, source: Source, own: torch.Tensor) -> Fetch:
    spec = turn.prompt.spec(turn.writer_size)
    heads, rows = source.heads, None
    if turn.reads_ranges and heads.count < source.num_heads:
        row_bytes = spec.num_bytes // source.num_heads
        rows = Rows(heads.first, heads.first + heads.count, source.num_heads, row_bytes)
    return Fetch(
        turn.prompt.key(chunk, source.share, turn.writer_size),
        _GIVE_UP_S,
        PROLOGUE_BYTES + (rows.num_bytes if rows else spec.num_bytes),
        use=partial(_take_heads, source, own, turn.reads_ranges),
        rows=rows,
    )


def _take_heads(source: Source, own: torch.Tensor, is_range: bool, stored: StoredObject) -> None:  # noqa: FBT001
    """Copy the rank's heads to `own`; of a whole object as if it held blocks as vLLM does."""
    payload = as_tensor(stored.payload, stored.facts).flatten()
    heads = source.heads
    target = own.narrow(1, heads.first_own, heads.count)
    if is_range:
        target.copy_(payload.view(heads.count, NUM_PAGES, -1).transpose(0, 1))
        return
    pages = payload.view(NUM_PAGES, source.num_heads, -1)
    target.copy_(pages.narrow(1, heads.first, heads.count))


def _store(place: Place, prompt: Prompt, size: int) -> None:
    """Put all shares of `prompt` as an engine of TP size `size` does."""
    with tempfile.TemporaryDirectory() as host:
        config = KVConfig(**place.options, host_cache_dir=f"{host}/host")
        engine = TransferEngine(config, OPTIONS_PATH)
        staging = Staging(torch.device("cpu"), 256 << 20)
        spec = prompt.spec(size)
        payload = torch.frombuffer(noise(spec.num_bytes), dtype=torch.uint8).view(spec.shape)
        for chunk in range(prompt.num_chunks):
            for share in range(size):
                while (slab := staging.reserve(spec)) is None:
                    time.sleep(0.01)
                slab.payload.copy_(payload)
                engine.submit(Put(prompt.key(chunk, share, size), slab))
        engine.drain(_GIVE_UP_S)
        engine.close()


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
