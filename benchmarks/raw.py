# SPDX-License-Identifier: Apache-2.0
"""The bare clients that a store is measured against: no keys, no checks, no atomic writes.

Each is written as by a programmer who stores bytes in the same place and knows the client's fast
options.
"""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
import s3fs
from obstore.store import S3Store

from benchmarks.places import Place

Body = memoryview
_PIECE_BYTES = 1 << 18


class RawClient(ABC):
    """Puts and gets many objects, `lanes` at once; each received byte is in memory on return."""

    name: str

    @abstractmethod
    def put(self, names: Sequence[str], body: Body, lanes: int) -> None:
        """Write `body` under each of `names`."""

    @abstractmethod
    def get(self, names: Sequence[str], lanes: int) -> None:
        """Read the objects under `names`."""

    def delete(self, names: Sequence[str]) -> None:  # noqa: B027
        """Delete the objects under `names`; no-op on S3, where SeaweedFS frees late or never."""

    def close(self) -> None:  # noqa: B027 — most have nothing to release
        """Close connections."""


class RawFiles(RawClient):
    """Plain files: `write` to the final name, `readinto` a ready buffer."""

    def __init__(self, place: Place, *, sync: bool, name: str = "") -> None:
        """`sync`: to the disk, as a store should."""
        assert place.folder is not None
        self.name = name or ("os, fsync" if sync else "os")
        self._folder = place.folder / f"raw {self.name}"
        self._folder.mkdir(exist_ok=True)
        self._sync = sync

    def put(self, names: Sequence[str], body: Body, lanes: int) -> None:
        """See RawClient."""

        def some(part: Sequence[str]) -> None:
            for name in part:
                with open(self._folder / name, "wb", buffering=0) as file:
                    file.write(body)
                    if self._sync:
                        os.fsync(file.fileno())

        _in_lanes(some, names, lanes)

    def get(self, names: Sequence[str], lanes: int) -> None:
        """See RawClient."""

        def some(part: Sequence[str]) -> None:
            # All objects of a call are of one size.
            buffer = bytearray((self._folder / part[0]).stat().st_size)
            for name in part:
                with open(self._folder / name, "rb", buffering=0) as file:
                    assert file.readinto(buffer) == len(buffer)

        _in_lanes(some, names, lanes)

    def pieces(self, name: str) -> Iterator[Body]:
        """Yield an object in pieces, as they arrive. Each is valid until the next one."""
        buffer = memoryview(bytearray(_PIECE_BYTES))
        with open(self._folder / name, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                yield buffer[:count]

    def delete(self, names: Sequence[str]) -> None:
        """See RawClient."""
        for name in names:
            (self._folder / name).unlink()


class FilesInThreads(RawFiles):
    """The same calls, each in a thread, for an event loop that must not wait for a disk."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, sync=True, name="os, in threads")
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor()

    def put(self, names: Sequence[str], body: Body, lanes: int) -> None:
        """See RawClient."""
        write = super().put
        self._in_threads(names, lanes, lambda name: write([name], body, 1))

    def get(self, names: Sequence[str], lanes: int) -> None:
        """See RawClient."""
        read = super().get
        self._in_threads(names, lanes, lambda name: read([name], 1))

    def close(self) -> None:
        """End the threads and the loop."""
        self._threads.shutdown()
        self._loop.close()

    def _in_threads(self, names: Sequence[str], lanes: int, call: Callable[[str], None]) -> None:
        run = self._loop.run_in_executor
        in_lanes_on(self._loop, names, lanes, lambda name: run(self._threads, call, name))


class RawObstore(RawClient):
    """obstore's blocking calls in threads; bodies neither hashed nor cut in parts."""

    name = "obstore"

    def __init__(self, place: Place) -> None:
        address = urlsplit(place.url)
        options = place.storage_options
        self._store = S3Store(
            address.netloc,
            prefix=f"{address.path.strip('/')}/raw-obstore",
            endpoint=options["endpoint_url"],
            access_key_id=options["key"],
            secret_access_key=options["secret"],
            region="us-east-1",
            unsigned_payload=True,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": timedelta(seconds=60)},
        )

    def put(self, names: Sequence[str], body: Body, lanes: int) -> None:
        """See RawClient."""

        def some(part: Sequence[str]) -> None:
            for name in part:
                obstore.put(self._store, name, body, use_multipart=False)

        _in_lanes(some, names, lanes)

    def get(self, names: Sequence[str], lanes: int) -> None:
        """See RawClient."""

        def some(part: Sequence[str]) -> None:
            for name in part:
                obstore.get(self._store, name).bytes()

        _in_lanes(some, names, lanes)

    def pieces(self, name: str) -> Iterator[Body]:
        """Yield an object in pieces, as they arrive. Each is valid until the next one."""
        return map(memoryview, obstore.get(self._store, name).stream(min_chunk_size=_PIECE_BYTES))


class RawS3fs(RawClient):
    """s3fs on an event loop of its own, without the HEAD that it sends before a GET by default."""

    name = "s3fs"

    def __init__(self, place: Place) -> None:
        self._root = f"{place.url.removeprefix('s3://')}/raw-s3fs"
        self._loop = asyncio.new_event_loop()
        self._fs: Any = s3fs.S3FileSystem(
            **place.storage_options,
            asynchronous=True,
            max_concurrency=1,
            use_listings_cache=False,
            skip_instance_cache=True,
            loop=self._loop,
        )
        self._session = self._loop.run_until_complete(self._fs.set_session())

    def put(self, names: Sequence[str], body: Body, lanes: int) -> None:
        """See RawClient."""
        whole = bytes(body)  # it takes nothing else
        self._each(names, lanes, lambda path: self._fs._pipe_file(path, whole))

    def get(self, names: Sequence[str], lanes: int) -> None:
        """See RawClient."""
        self._each(names, lanes, self._fs._cat_file)

    def close(self) -> None:
        """See RawClient."""
        self._loop.run_until_complete(self._session.close())
        self._loop.close()

    def _each(self, names: Sequence[str], lanes: int, call: Any) -> None:
        in_lanes_on(self._loop, names, lanes, lambda name: call(f"{self._root}/{name}"))


def in_lanes_on(
    loop: asyncio.AbstractEventLoop,
    names: Sequence[str],
    lanes: int,
    call: Callable[[str], Awaitable[object]],
) -> None:
    """Await `call(name)` for each of `names` on `loop`, `lanes` at once."""

    async def lane(first: int) -> None:
        for name in names[first::lanes]:
            await call(name)

    async def run() -> None:
        await asyncio.gather(*(lane(first) for first in range(lanes)))

    loop.run_until_complete(run())


def _in_lanes(work: Callable[[Sequence[str]], None], names: Sequence[str], lanes: int) -> None:
    """Do `work(part)` for the parts of `names`, each in a thread; one lane needs no thread."""
    lanes = min(lanes, len(names))
    if lanes == 1:
        work(names)
        return
    with ThreadPoolExecutor(lanes) as threads:
        for done in [threads.submit(work, names[first::lanes]) for first in range(lanes)]:
            done.result()
