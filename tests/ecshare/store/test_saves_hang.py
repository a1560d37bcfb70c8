# SPDX-License-Identifier: Apache-2.0
"""A store answers reads while any number of saves hang."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ecshare.store.config import StoreConfig
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.fsspec.store import FsspecStore, open_fsspec
from ecshare.store.keys import Kind, object_key
from ecshare.store.objects import ObjectStore, read
from ecshare.store.open import open_store
from tests.bad_s3.server import BUCKET, Request, Stored, bad_s3

KEY = object_key(Kind.EC, "0" * 32, "stored")
NUM_SAVES = 70  # more than any client has threads for
GIVE_UP_S = 30.0


class Held:
    """Blocks saves until the test ends."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self._arrived = threading.Semaphore(0)

    def wait(self) -> None:
        self._arrived.release()
        self.released.wait(GIVE_UP_S)

    def until_arrived(self, number: int) -> None:
        for _ in range(number):
            assert self._arrived.acquire(timeout=GIVE_UP_S)


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.released.set()


@contextlib.asynccontextmanager
async def hung_saves(store: ObjectStore, held: Held, number: int = 8) -> AsyncIterator[None]:
    """Start many saves, and wait until at least `number` of them hang."""
    keys = [object_key(Kind.EC, "0" * 32, f"new {number}") for number in range(NUM_SAVES)]
    saves = [asyncio.create_task(store.put(key, b"body")) for key in keys]
    await asyncio.to_thread(held.until_arrived, number)
    try:
        yield
    finally:
        held.released.set()
        await asyncio.gather(*saves, return_exceptions=True)
        await store.close()


async def check_reads(store: ObjectStore) -> None:
    async with asyncio.timeout(GIVE_UP_S / 2):
        assert bytes(await read(store, KEY, 1 << 20)) == b"body"
        assert await store.exists([KEY]) == [True]


async def test_reads_work_while_saves_hang_on_a_disk(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore.open(f"{tmp_path}/store", "options.url")
    await store.put(KEY, b"body")
    monkeypatch.setattr(os, "fsync", lambda _: held.wait())
    async with hung_saves(store, held):
        await check_reads(store)


async def test_reads_work_while_saves_hang_in_a_filesystem(held: Held) -> None:
    class Hanging(MemoryFileSystem):  # type: ignore[misc]
        protocol = "hanging"

        def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
            if not path.endswith(KEY):
                held.wait()
            super().pipe_file(path, value, **options)

    store = FsspecStore(Hanging(), "/hung", atomic_writes=True)
    await store.put(KEY, b"body")
    async with hung_saves(store, held):
        await check_reads(store)


@pytest.mark.s3
@pytest.mark.parametrize(
    ("opened", "number"),
    [
        (lambda config: open_store(config, "options"), 64),
        (lambda config: open_fsspec(config, ""), 8),
    ],
)
async def test_reads_work_while_a_server_does_not_answer_puts(
    held: Held,
    opened: Callable[[StoreConfig], ObjectStore],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through obstore, which uses as many connections as saves are admitted, and through s3fs."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def hang(_: Request) -> None:
        held.wait()

    with bad_s3() as server:
        server.objects[f"x/{KEY}"] = Stored.of(b"body")
        server.faults = {"put": hang}
        store = opened(
            StoreConfig(
                url=f"s3://{BUCKET}/x",
                storage_options=server.storage_options,
                io_timeout_s=GIVE_UP_S,
            )
        )
        async with hung_saves(store, held, number):
            await check_reads(store)
