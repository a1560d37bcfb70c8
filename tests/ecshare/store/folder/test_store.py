# SPDX-License-Identifier: Apache-2.0
import asyncio
import errno
import itertools
import multiprocessing
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ecshare.store.errors import (
    ConfigError,
    ObjectMissing,
    ObjectUnreadable,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.keys import Key, Kind, object_key
from ecshare.store.objects import probe, read
from ecshare.transfer.client.priority import Priority
from ecshare.transfer.client.store_client import StoreClient

KEY = object_key(Kind.EC, "0" * 32, "an object")
LIMIT = 1 << 30


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[DirectoryStore]:
    store = DirectoryStore.open(f"{tmp_path}/store", "options.url")
    yield store
    await store.close()


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


async def test_object_is_one_file_named_by_its_key(store: DirectoryStore, tmp_path: Path) -> None:
    await store.put(KEY, b"body")
    assert files(tmp_path / "store") == [KEY]
    assert (tmp_path / "store" / KEY).read_bytes() == b"body"


@pytest.mark.parametrize(("is_shared", "mode"), [(False, 0o400), (True, 0o440)])
async def test_object_is_readable_by_its_user_or_group(
    tmp_path: Path, is_shared: bool, mode: int
) -> None:
    store = DirectoryStore.open(f"{tmp_path}/store", "options.url", is_shared=is_shared)
    assert await store.put(KEY, b"body")
    await store.close()
    stored = tmp_path / "store" / KEY
    assert stored.stat().st_mode & 0o777 == mode
    assert files(stored.parent) == [stored.name]


@pytest.mark.parametrize(("look_s", "num_together"), [(1e-5, 30), (1e-3, 1)])
async def test_threads_of_a_look_up_fit_the_latency_of_the_file_system(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, look_s: float, num_together: int
) -> None:
    """On a local disk another thread costs more than it saves, over a network it saves more."""
    clock_s = itertools.count(0.0, look_s)
    clock = SimpleNamespace(perf_counter=lambda: next(clock_s))
    monkeypatch.setattr("ecshare.store.folder.store.time", clock)
    given: list[int] = []
    each = store._threads.each

    async def noted(call: Any, keys: Any, num_together: int) -> Any:
        given.append(num_together)
        return await each(call, keys, num_together)

    monkeypatch.setattr(store._threads, "each", noted)
    await store.put(KEY, b"body")
    keys = [Key(f"{KEY}.{number}") for number in range(11)]
    for _ in range(2):
        assert await store.exists([*keys, KEY]) == [False] * 11 + [True]
    assert given == [pytest.approx(num_together, abs=1)] * 2
    assert next(clock_s) == pytest.approx(6 * look_s), "it is measured once"


async def test_failed_write_leaves_no_file(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk_full)
        with pytest.raises(StoreUnavailable, match="No space left"):
            await store.put(KEY, b"body")
    assert files(tmp_path) == []
    assert await store.put(KEY, b"body")


async def test_short_writes_are_continued(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel writes at most 2 GB in one call, and less when it is interrupted."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, body: write(fd, body[:1000]))
    body = os.urandom(10_500)
    await store.put(KEY, body)
    assert await read(store, KEY, LIMIT) == memoryview(body)


@pytest.mark.parametrize("num_bytes", [1, 64_000, 20_000_000])
async def test_get_uses_one_thread_call(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    body = os.urandom(num_bytes)
    await store.put(KEY, body)
    loop, calls = asyncio.get_running_loop(), list[object]()
    run = loop.run_in_executor

    def counted(*args: Any) -> Any:
        calls.append(args)
        return run(*args)

    monkeypatch.setattr(loop, "run_in_executor", counted)
    assert await read(store, KEY, LIMIT) == memoryview(body)
    assert len(calls) == 1


async def test_short_reads_are_continued(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:1000]], offset)
    )
    body = os.urandom(10_500)
    await store.put(KEY, body)
    assert await read(store, KEY, LIMIT) == memoryview(body)


@pytest.mark.parametrize("size", [1000, 5 << 20])
async def test_file_that_shrinks_during_a_read_is_refused(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    await store.put(KEY, bytes(size))
    fstat = os.fstat

    def then_shrink(fd: int) -> os.stat_result:
        status = fstat(fd)
        os.truncate(tmp_path / "store" / KEY, 700)
        return status

    monkeypatch.setattr(os, "fstat", then_shrink)
    with pytest.raises(StoreUnavailable, match="shorter"):
        await read(store, KEY, LIMIT)


async def test_temporary_and_foreign_files_are_not_listed(
    store: DirectoryStore, tmp_path: Path
) -> None:
    await store.put(KEY, b"body")
    (tmp_path / "store" / KEY).with_name(".0123.77.tmp").write_bytes(b"torn")
    (tmp_path / "store" / "notes for people.txt").write_text("hello")
    assert [info.key async for info in store.list("")] == [KEY]


async def test_symbolic_link_is_not_listed(store: DirectoryStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("x")
    (tmp_path / "store" / "link").symlink_to(tmp_path / "elsewhere")
    assert [info.key async for info in store.list("")] == []


@pytest.mark.parametrize("ask", [partial(read, limit_bytes=LIMIT), DirectoryStore.stat])
async def test_pipe_in_place_of_an_object_does_not_hang(
    store: DirectoryStore, tmp_path: Path, ask: Callable[[DirectoryStore, Key], Awaitable[object]]
) -> None:
    pipe = tmp_path / "store" / KEY
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    try:
        with pytest.raises(ObjectUnreadable):
            await asyncio.wait_for(ask(store, KEY), 10)
    finally:
        os.close(os.open(pipe, os.O_RDWR))  # gives a writer to a thread that waits for one


def refuse_links(*_: object, number: int = errno.EPERM, **__: object) -> None:
    raise OSError(number, "no")


@pytest.mark.parametrize(
    "no_links", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV]
)
async def test_objects_are_renamed_into_place_without_hard_links(
    store: DirectoryStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    no_links: int,
) -> None:
    monkeypatch.setattr(os, "link", partial(refuse_links, number=no_links))
    assert await store.put(KEY, b"body")
    assert await store.put(Key(f"{KEY}.p"), b"part")
    assert files(tmp_path / "store") == [KEY, KEY + ".p"]
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
async def test_permission_errors_are_store_denied(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    await store.put(KEY, b"body")

    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number), "/the/path")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreDenied, match=r"/the/path"):
        await read(store, KEY, LIMIT)
    with pytest.raises(StoreDenied):
        await store.put(Key(f"{KEY}.p"), b"x")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTDIR, errno.EMFILE])
async def test_io_error_is_not_a_miss(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(StoreUnavailable, match=os.strerror(number)):
        await read(store, KEY, LIMIT)
    with pytest.raises(StoreUnavailable):
        await store.exists([KEY])


async def test_bad_object_does_not_open_a_breaker(store: DirectoryStore, tmp_path: Path) -> None:
    (tmp_path / "store" / KEY).mkdir(parents=True)
    access = StoreClient(store, 30.0)
    for call in (
        lambda store: read(store, KEY, LIMIT),
        lambda store: store.delete([KEY]),
        lambda store: store.put(KEY, b"x"),
    ):
        for _ in range(5):
            with pytest.raises(StoreError):
                await access.ask(call, Priority.LOAD)
        assert not access.open_breakers


@pytest.mark.parametrize("links", [True, False])
async def test_folder_in_place_of_an_object_blocks_only_its_key(
    store: DirectoryStore, tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not removed, because it may be the user's."""
    if not links:
        monkeypatch.setattr(os, "link", refuse_links)
        await store.put(Key(f"{KEY}.p"), b"another")
        await store.delete([Key(f"{KEY}.p")])
        assert not store.creates_once
    folder = tmp_path / "store" / KEY
    folder.mkdir(parents=True)
    assert await store.exists([KEY]) == [False]
    with pytest.raises(ObjectUnreadable, match="not a file"):
        await read(store, KEY, LIMIT)
    with pytest.raises(ObjectUnreadable, match="not a file"):
        await store.put(KEY, b"x")
    with pytest.raises(ObjectUnreadable):
        await store.delete([KEY])
    assert files(folder.parent) == []
    assert folder.is_dir()


async def test_file_in_place_of_the_last_folder_blocks_only_its_objects(
    store: DirectoryStore, tmp_path: Path
) -> None:
    folder = (tmp_path / "store" / KEY).parent
    folder.parent.mkdir(parents=True)
    folder.write_bytes(b"")
    assert await store.exists([KEY]) == [False]
    for call in (read(store, KEY, LIMIT), store.put(KEY, b"x"), store.delete([KEY])):
        with pytest.raises(ObjectUnreadable):
            await call


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_file_in_place_of_a_higher_folder_is_a_store_failure(
    store: DirectoryStore, tmp_path: Path, level: int
) -> None:
    place = tmp_path / "store" / "/".join(KEY.split("/")[:level])
    if place.is_dir():
        place.rmdir()
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"")
    with pytest.raises(StoreUnavailable):
        await store.exists([KEY])
    for call in (read(store, KEY, LIMIT), store.put(KEY, b"x")):
        with pytest.raises(StoreUnavailable):
            await call


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
async def test_unreadable_file_blocks_only_its_key(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Simulates a file of mode 000 or of another owner, since this user may be root."""
    await store.put(KEY, b"body")
    path, opened = f"{tmp_path}/store/{KEY}", os.open

    def refuse_one(name: str, *args: Any, **options: Any) -> int:
        if name == path:
            raise OSError(number, os.strerror(number), name)
        return opened(name, *args, **options)

    monkeypatch.setattr(os, "open", refuse_one)
    monkeypatch.setattr(os, "access", lambda name, _: name != path)
    with pytest.raises(ObjectUnreadable, match=os.strerror(number)):
        await read(store, KEY, LIMIT)
    with pytest.raises(ObjectUnreadable):
        await store.put(KEY, b"body")
    assert await store.put(Key(f"{KEY}.p"), b"x")
    await store.delete([KEY])
    assert await store.put(KEY, b"body")


async def test_missing_root_is_not_recreated(store: DirectoryStore, tmp_path: Path) -> None:
    """It may have been a mount: writes would fill the disk below."""
    (tmp_path / "store").rmdir()
    with pytest.raises(StoreUnavailable, match="gone"):
        await store.put(KEY, b"x")
    with pytest.raises(StoreUnavailable, match="gone"):
        await probe(store, write=False)
    assert not (tmp_path / "store").exists()
    with pytest.raises(ObjectMissing):
        await read(store, KEY, LIMIT)


def test_file_in_place_of_the_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"options\.url: .*/file is a file"):
        DirectoryStore.open(f"{tmp_path}/file", "options.url")
    with pytest.raises(ConfigError, match=r"options\.url: the folder .*/file/x cannot be made"):
        DirectoryStore.open(f"{tmp_path}/file/x", "options.url")
    with pytest.raises(ConfigError, match=r"options\.url: the folder .* cannot be made"):
        DirectoryStore.open(f"{tmp_path}/a\0b", "options.url")


def _write(root: str, ready: "multiprocessing.synchronize.Barrier", seed: int) -> None:
    import asyncio

    async def go() -> int:
        store = DirectoryStore.open(root, "options.url")
        won = 0
        for n in range(30):
            key = object_key(Kind.EC, "0" * 32, str(n))
            ready.wait(60)
            won += await store.put(key, bytes([n]) * 300_000)
            assert bytes(await read(store, key, LIMIT)) == bytes([n]) * 300_000
        await store.close()
        return won

    Path(f"{root}/.won{seed}").write_text(str(asyncio.run(go())))


def test_one_of_several_writer_processes_wins_each_key(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(3)
    writers = [context.Process(target=_write, args=(str(tmp_path), ready, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert sum(int(path.read_text()) for path in tmp_path.glob(".won*")) == 30
    assert not [*tmp_path.rglob("*.tmp")]
