# SPDX-License-Identifier: Apache-2.0
"""What `ecshare du` and `ecshare gc` cost on a large store, beside `find -delete` and rclone.

A folder and a bucket of a real S3 server on loopback (SeaweedFS) are filled with small objects of
ten namespaces, half of them KV with notes of use. Each command is a process of its own: its time
from start to end, the CPU time of it, and its peak memory. What removes all is compared with
`find -type f -delete` and `rclone delete` on a store of the same objects, filled anew for each.

    python -m benchmarks.cleaning [--objects N] [--s3-objects N]
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import Report, Table, arguments, command_line
from ecshare.store.config import StoreConfig
from ecshare.store.keys import CLEANED_KEY, Key, Kind, new_uses_key, object_key, use_id_of
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store
from ecshare.upkeep.uses import Uses, pack
from lab.servers.processes import program
from lab.servers.s3 import BUCKET, SeaweedFS

MODULE = "benchmarks.cleaning"
NUM_NAMESPACES = 10
BODY = bytes(100)
NOTED = 1 << 16
AT_ONCE = 64

Command = Sequence[str]


def keys(num: int) -> Iterator[Key]:
    """Yield the keys of `num` objects, half of them embeddings."""
    for n in range(num):
        kind = Kind.EC if n % 2 else Kind.KV
        namespace = f"{n % NUM_NAMESPACES:032x}"
        yield object_key(kind, namespace, str(n), "" if n % 2 else "t0of1")


def fill_folder(root: Path, num: int) -> None:
    """Write the files themselves: the store would flush each to the disk."""
    made: set[str] = set()
    for key in keys(num):
        folder, _, name = key.rpartition("/")
        if folder not in made:
            made.add(folder)
            (root / folder).mkdir(parents=True, exist_ok=True)
        with open(f"{root}/{folder}/{name}", "wb") as file:
            file.write(BODY)


async def fill_bucket(config: StoreConfig, num: int) -> None:
    """Put the objects, many at a time."""
    store, left = open_store(config, "options"), keys(num)

    async def work() -> None:
        for key in left:
            await store.put(key, BODY)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    await store.close()


async def note_uses(config: StoreConfig, num: int) -> None:
    """Store notes of use of all KV, as engines do."""
    store: ObjectStore = open_store(config, "options")
    noted = [key for key in keys(num) if key.startswith("kv/")]
    for start in range(0, len(noted), NOTED):
        key = new_uses_key(Kind.KV)
        rows = ((use_id_of(each), 1, n) for n, each in enumerate(noted[start : start + NOTED]))
        await store.put(key, pack(Uses.of(rows), key, None))
    await store.put(CLEANED_KEY, b"ecshare", replace=True)
    await store.close()


def measure(command: Command, environment: Mapping[str, str]) -> tuple[float, float, float]:
    """Run it; return its seconds, its CPU seconds, and its peak memory in MB."""
    # A process between them: the usage of children is a sum.
    code = (
        "import resource, subprocess, sys, time; began = time.monotonic(); "
        "subprocess.run(sys.argv[1:], check=True, stdout=2); took = time.monotonic() - began; "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(took, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *command],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    )
    took_s, cpu_s, peak = map(float, ran.stdout.split())
    return took_s, cpu_s, peak


class Place:
    """A store that can be filled, and how others remove all of it."""

    def __init__(
        self,
        name: str,
        config: StoreConfig,
        fill: Callable[[], None],
        other: tuple[str, Command, Mapping[str, str]],
    ) -> None:
        self.name = name
        self.config = config
        self.fill = fill
        self.other, self.other_command, self.environment = other

    @property
    def argument(self) -> str:
        """Return the argument STORE of our commands."""
        return json.dumps(
            {"url": self.config.url, "storage_options": dict(self.config.storage_options)}
        )


def compare(place: Place, num: int, table: Table) -> None:
    """Measure all commands on one place."""

    def add(what: str, command: Command) -> None:
        table.add(place.name, num, what, *measure(command, place.environment))

    def ours(*words: str) -> Command:
        name, *options = words
        return [sys.executable, "-m", "ecshare", name, place.argument, *options]

    place.fill()
    asyncio.run(note_uses(place.config, num))
    add("ecshare du", ours("du"))
    add("ecshare gc --dry-run", ours("gc", "--max-bytes", "1", "--dry-run"))
    add("ecshare gc, of all", ours("gc", "--max-bytes", "0"))
    place.fill()
    add(f"{place.other}, of all", place.other_command)


@contextmanager
def folder(num: int) -> Iterator[Place]:
    """Make a folder on the disk of the temporary folder."""
    root = Path(tempfile.mkdtemp(prefix="ecshare-cleaning-"))
    root.chmod(0o700)
    find = ["find", str(root), "-type", "f", "-delete"]
    try:
        config = StoreConfig(url=str(root))
        yield Place("folder", config, lambda: fill_folder(root, num), ("find -delete", find, {}))
    finally:
        shutil.rmtree(root)


@contextmanager
def bucket(num: int) -> Iterator[Place]:
    """Start an S3 server."""
    with SeaweedFS(tempfile.gettempdir(), "cleaning") as server:
        options = server.storage_options
        config = StoreConfig(url=server.url, storage_options=options)
        remote = {
            "RCLONE_CONFIG_S3_TYPE": "s3",
            "RCLONE_CONFIG_S3_PROVIDER": "SeaweedFS",
            "RCLONE_CONFIG_S3_ACCESS_KEY_ID": str(options["key"]),
            "RCLONE_CONFIG_S3_SECRET_ACCESS_KEY": str(options["secret"]),
            "RCLONE_CONFIG_S3_ENDPOINT": str(options["endpoint_url"]),
        }
        delete = [program("rclone"), "delete", f"s3:{BUCKET}/cache", "--fast-list"]
        yield Place(
            "S3 (SeaweedFS)",
            config,
            lambda: asyncio.run(fill_bucket(config, num)),
            ("rclone delete", delete, remote),
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print and keep the table."""
    parser = arguments(__doc__ or "", MODULE)
    parser.add_argument("--objects", type=int, help="of the folder (1,000,000)")
    parser.add_argument("--s3-objects", type=int, help="of the bucket (100,000)")
    options = parser.parse_args(argv)
    num_folder = options.objects or (2_000 if options.quick else 1_000_000)
    num_bucket = options.s3_objects or (500 if options.quick else 100_000)
    table = Table(
        "Commands on a large store",
        ("store", "objects", "command", "s", "CPU s", "peak MB"),
        "Objects of 100 bytes. Half of them have notes of use. The CPU time of the S3 "
        "server is not counted.",
    )
    for make, num in ((folder, num_folder), (bucket, num_bucket)):
        with make(num) as place:
            compare(place, num, table)
    settings = {"objects": num_folder, "s3_objects": num_bucket}
    report = Report("cleaning", command_line(MODULE, options), settings)
    report.add(table)
    report.write(options.results)


if __name__ == "__main__":
    main()
