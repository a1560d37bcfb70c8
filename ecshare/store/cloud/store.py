# SPDX-License-Identifier: Apache-2.0
"""A store in S3, Azure or Google Cloud, through obstore.

obstore's blocking calls in our own threads take less than half the CPU time of its coroutines, and
an eighth to a thirtieth of s3fs's. Bodies are sent from the caller's memory without a copy. Bodies
that arrive are written to the sink piece by piece, as obstore receives them.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import obstore
from obstore.store import AzureStore, GCSStore, S3Store

from ecshare.store.cloud.errors import (
    FOREIGN,
    InvalidKey,
    Misunderstood,
    answered,
    mapped_errors,
    status_of,
)
from ecshare.store.cloud.plan import CloudPlan
from ecshare.store.errors import (
    ConfigError,
    ObjectCorrupt,
    ObjectMissing,
    StoreUnavailable,
)
from ecshare.store.keys import Key, is_safe_key
from ecshare.store.objects import (
    Buffer,
    ByteRange,
    ObjectInfo,
    ObjectStat,
    Sink,
    cut,
    md5_of_etag,
)
from ecshare.store.secrets import masked_text
from ecshare.store.statuses import Conflict
from ecshare.store.threads import Threads, gather_all

if TYPE_CHECKING:
    from obstore.store import BackoffConfig

logger = logging.getLogger(__name__)

# A body is received over one connection, which is best if connections are fast. Some stores limit
# each to about 80 MB/s. If, after TRIAL_BYTES, the rest would take longer than SLOW_S, several
# connections fetch it in pieces.
_CHUNK_BYTES = 1 << 20  # written to the sink at once, while the next one arrives
TRIAL_BYTES = 4 << 20
SLOW_S = 0.25
PIECE_BYTES = 8 << 20
# Concurrent requests: 32 loads, as small objects need at a round trip of 20 ms, and as many polls.
# Saves have threads of their own, so that saves that hang do not block loads.
_REQUESTS = 64
_SAVES = 64  # the most that `Admission` admits
PIECES = 8  # of one object at once
_RETRIES = 2
_BACKOFF: "BackoffConfig" = {
    "init_backoff": timedelta(milliseconds=50),
    "max_backoff": timedelta(seconds=1),
    "base": 2,
}
LISTED = 1000  # a page of S3
# A server may send pages, or keys that obstore refuses, without end.
MOST_PAGES = 10_000
MOST_INVALID_KEYS = 64
_NOT_SATISFIABLE = 416
_TOO_SHORT = "but object was only"

# Matches the first part of a key that `is_safe_key` refuses: another character, or a level that is
# empty, "." or "..". Keys sort by their characters, and levels begin with one of _LETTERS.
_INVALID_PART = re.compile(r"[^a-z0-9._/-]|(?<![^/])\.{0,2}/")
_LETTERS = "-0123456789_abcdefghijklmnopqrstuvwxyz"
_LONGEST_SHOWN = 200

ObstoreClient = S3Store | AzureStore | GCSStore
_KINDS: dict[str, type[ObstoreClient]] = {"s3": S3Store, "azure": AzureStore, "gcs": GCSStore}


def open_cloud(
    plan: CloudPlan, io_timeout_s: float, path: str = "options", secrets: Collection[str] = ()
) -> "CloudStore":
    """Return the store that `plan` describes. Uses no network.

    `path`: where the user wrote the options; `secrets`: texts that no error may contain.

    Raises:
        ConfigError: obstore cannot use the options or the environment.
    """
    try:
        if plan.cloud == "s3":
            plain = _open(plan, io_timeout_s, disable_bulk_delete=True)
            checked = _open(plan, io_timeout_s, checksum_algorithm="crc64nvme")
        else:
            plain = checked = _open(plan, io_timeout_s)
    except (*FOREIGN, ValueError, TypeError) as exc:
        words = masked_text(str(exc).partition("\n")[0][:300], secrets)
        # Without what obstore said: it may quote a secret.
        raise ConfigError(f"{path}.storage_options: obstore cannot use them: {words}") from None
    return CloudStore(plain, checked=checked)


def _open(plan: CloudPlan, io_timeout_s: float, **extra: Any) -> ObstoreClient:
    # After this time, threads and connections of cancelled operations are free again. The caller
    # decides earlier that an operation has failed.
    limit = timedelta(seconds=io_timeout_s)
    client: Any = {
        **plan.client,
        "timeout": limit,
        "connect_timeout": min(limit, timedelta(seconds=5)),
    }
    config: Any = {**plan.config, **extra}
    credentials: Any = plan.credentials
    return _KINDS[plan.cloud](
        plan.bucket,
        prefix=plan.prefix or None,
        config=config,
        client_options=client,
        retry_config={
            "max_retries": _RETRIES,
            "retry_timeout": limit,
            "backoff": _BACKOFF,
        },
        credential_provider=credentials,
    )


class CloudStore:
    """An ObjectStore in one bucket.

    Ownership: `_puts` and `_ranges` record what the server supports, and are only ever lowered. A
    thread that reads an older value only repeats one failing request.
    """

    def __init__(self, plain: ObstoreClient, *, checked: ObstoreClient) -> None:
        """Use two clients of one bucket. `checked` sends checksums, and deletes many objects by one
        request; it is `plain` itself for clouds without such options."""
        self._plain = plain
        self._checked = checked
        # How to write, from the best way to the one that every server understands.
        self._puts: Sequence[tuple[ObstoreClient, Literal["create", "overwrite"]]]
        self._puts = [(plain, "create"), (plain, "overwrite")]
        if checked is not plain:
            self._puts = [(checked, "create"), *self._puts]
        self._ranges = True
        self._is_closed = False
        self._threads = Threads("cloud", _REQUESTS)
        self._saving = Threads("cloud-save", _SAVES)

    @property
    def creates_once(self) -> bool:
        """See ObjectStore. A server that ignores create-only is not detected."""
        _, mode = self._puts[0]
        return mode == "create"

    @property
    def serves_many(self) -> bool:
        """See ObjectStore."""
        return True

    async def get(self, key: Key, sink: Sink) -> None:
        """See ObjectStore."""
        first = await self._threads.run(self._first, key, sink)
        if first.at < first.size:
            rest = cut(ByteRange(first.at, first.size), PIECE_BYTES)
            try:
                await self._pieces(key, rest, first, sink)
            except _RangesIgnored:
                await self._threads.run(self._rest, key, first, sink)

    async def _pieces(
        self, key: Key, pieces: Sequence[ByteRange], first: "_Answer", sink: Sink
    ) -> None:
        limit = asyncio.Semaphore(PIECES)

        async def fetch(piece: ByteRange) -> None:
            async with limit:
                await self._threads.run(self._piece, key, piece, first, sink)

        await gather_all(map(fetch, pieces))

    async def put(self, key: Key, body: Buffer, *, replace: bool = False) -> bool:
        """See ObjectStore. If the server ignores create-only, True also for a second write."""
        return await self._saving.run(self._put, key, body, replace)

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See ObjectStore."""
        return await self._threads.each(self._exists, list(keys))

    async def stat(self, key: Key) -> ObjectStat:
        """See ObjectStore. An ETag in the form of an MD5 is the object's MD5, unless the object is
        encrypted. Then it differs from the MD5 of the bytes, and proves nothing."""
        return await self._threads.run(self._stat, key)

    async def delete(self, keys: Sequence[Key]) -> None:
        """See ObjectStore."""
        if keys:
            await self._saving.run(self._delete, list(keys))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See ObjectStore. Ends early if `close` is called."""
        below = Key(prefix.removesuffix("/")) if prefix else None
        pages = obstore.list(self._plain, below, chunk_size=LISTED)
        invalid: list[str] = []
        for _ in range(MOST_PAGES):
            try:
                page = await self._next_page(pages)
            except InvalidKey as exc:
                offset = offset_behind(exc.key.removeprefix(f"{self._plain.prefix or ''}/"))
                # Azure ignores the offset, so the same key is listed again.
                if (
                    exc.key in invalid
                    or len(invalid) == MOST_INVALID_KEYS
                    or not offset.startswith(prefix)
                ):
                    return
                invalid.append(exc.key)
                self._warn_of_key(prefix, exc.key)
                pages = obstore.list(self._plain, below, chunk_size=LISTED, offset=offset)
                continue
            if not page or self._is_closed:
                return
            for meta in page:
                if is_safe_key(key := meta["path"]):
                    yield ObjectInfo(Key(key), meta["size"], meta["last_modified"].timestamp())
        raise StoreUnavailable(f"a listing has more than {MOST_PAGES:,} pages, or does not end")

    async def _next_page(self, pages: Any) -> Sequence[Any]:
        """Return the next page; empty at the end.

        Not in a thread: it could not be stopped, and a server may send empty pages without end.
        """
        with mapped_errors("a listing", finds=False):
            return await anext(pages, [])

    def _warn_of_key(self, prefix: str, key: str) -> None:
        logger.warning(
            "store: the listing of %s may lack keys before the key %s, because obstore cannot read "
            "the page with that key. No engine made the key: remove it",
            prefix or "the store",
            ascii(key)[:_LONGEST_SHOWN],
        )

    async def close(self) -> None:
        """See ObjectStore."""
        self._is_closed = True
        self._threads.close()
        self._saving.close()

    # What follows runs in the store's threads.

    def _first(self, key: Key, sink: Sink) -> "_Answer":
        """Send one GET for size and bytes, without a HEAD. Leave the rest of a slow body."""
        first = answered(key, partial(self._ask, key))
        with contextlib.closing(first):
            sink.begin(first.size)
            first.pour(sink, may_stop=self._ranges)
        return first

    def _rest(self, key: Key, first: "_Answer", sink: Sink) -> None:
        """Fetch the whole object again, and write to `sink` the bytes that `first` has left."""
        again = answered(key, partial(self._ask, key))
        with contextlib.closing(again):
            again.check_same(first)
            again.pour(sink, begin=first.at)

    def _piece(self, key: Key, piece: ByteRange, first: "_Answer", sink: Sink) -> None:
        with contextlib.closing(self._open(key, piece)) as answer:
            answer.pour_piece(sink, piece, first)

    def _open(self, key: Key, piece: ByteRange) -> "_Answer":
        """Send a GET for one piece, and return the answer before its body arrives."""
        try:
            return answered(key, partial(self._ask, key, {"range": (piece.start, piece.stop)}))
        except StoreUnavailable as exc:
            if "non-partial response" in str(exc.__cause__):
                self._ranges = False
                logger.info("the server ignores byte ranges: each object is fetched by one request")
                raise _RangesIgnored(str(exc)) from exc
            # The text is obstore's own, for a server that sends no bytes instead of a 416.
            if status_of(exc.__cause__) == _NOT_SATISFIABLE or _TOO_SHORT in str(exc.__cause__):
                raise ObjectCorrupt(f"corrupt object: it ends before byte {piece.stop}") from exc
            raise

    def _ask(self, key: Key, options: Any = None) -> "_Answer":
        """Send a GET.

        Raises:
            Exception: one of FOREIGN.
        """
        return _Answer(key, obstore.get(self._plain, key, options=options))

    def _put(self, key: Key, body: Buffer, replace: bool) -> bool:
        for n, (store, mode) in enumerate(ways := self._puts):
            try:
                is_written = self._send(store, key, body, "replace" if replace else mode)
            except Misunderstood:
                if n == len(ways) - 1:
                    raise
                continue
            if not is_written:
                return False
            if n and not replace:  # a replacing put does not show whether create-only is supported
                self._puts = ways[n:]
                logger.info(
                    "the server refuses checksums or create-only writes: writing without them"
                )
            return True
        raise AssertionError("the last way returns or raises")

    def _send(
        self,
        store: ObstoreClient,
        key: Key,
        body: Buffer,
        how: Literal["create", "overwrite", "replace"],
    ) -> bool:
        """Write `body`, or return False: the object exists, and `how` is not "replace".

        Some servers answer 409 if the object exists, others in a conflict of requests. A HEAD
        decides.
        """
        mode: Any = "create" if how == "create" else "overwrite"
        for is_last in (False, True):
            try:
                with mapped_errors(key, finds=False):
                    # One request: obstore has no create-only multipart upload.
                    obstore.put(store, key, memoryview(body), use_multipart=False, mode=mode)
            except Conflict as exc:
                if how == "create" and exc.says_exists:
                    return False
                with contextlib.suppress(StoreUnavailable):  # `exc` says more
                    if how != "replace" and self._exists(key):
                        return False
                if is_last:
                    raise
            else:
                return True
        raise AssertionError("the last attempt returns or raises")

    def _exists(self, key: Key) -> bool:
        try:
            answered(key, partial(obstore.head, self._plain, key))
        except ObjectMissing:
            return False
        return True

    def _stat(self, key: Key) -> ObjectStat:
        meta = answered(key, partial(obstore.head, self._plain, key))
        return ObjectStat(meta["size"], md5_of_etag(meta["e_tag"]))

    def _delete(self, keys: Sequence[Key]) -> None:
        try:
            answered(keys[0], partial(obstore.delete, self._checked, keys))
        except ObjectMissing:
            # S3 ignores missing objects. Other servers stop at one, before the keys after it.
            for key in keys if len(keys) > 1 else ():
                self._delete([key])
        except Misunderstood:
            # Some servers cannot delete many objects by one request. `plain` deletes one at a time.
            with contextlib.suppress(ObjectMissing):
                answered(keys[0], partial(obstore.delete, self._plain, keys))


class _Answer:
    """The answer to one GET: its headers have arrived, its body has not."""

    def __init__(self, key: Key, answer: "obstore.GetResult") -> None:
        self._key = key
        self._chunks: Iterator[Any] | None = answer.stream(min_chunk_size=_CHUNK_BYTES)
        self.size = answer.meta["size"]
        self.version = answer.meta["e_tag"]
        self.at, self.stop = answer.range
        """The next byte to arrive, and the byte before which the body ends."""

    def close(self) -> None:
        """End the connection, if the body has not arrived completely.

        Otherwise an exception's traceback would keep the connection open.
        """
        self._chunks = None

    def check_same(self, first: "_Answer") -> None:
        """Check that this answer is about the same object as `first`.

        Raises:
            StoreUnavailable: the object has changed meanwhile.
        """
        if (self.size, self.version) != (first.size, first.version):
            raise StoreUnavailable(f"{self._key} changed while it was read")

    def pour(self, sink: Sink, *, begin: int = 0, may_stop: bool = False) -> None:
        """Write the body to `sink` as it arrives. `begin`: the first byte that `sink` still lacks.

        `may_stop`: return early if the rest would be slow.
        """
        started_s = time.monotonic()
        while (chunk := self._next()) is not None:
            if self.at + len(chunk) > self.stop:
                raise StoreUnavailable(f"{self._key}: the server sent more than it announced")
            if begin < self.at + len(chunk):
                sink.write(max(self.at, begin), chunk[max(0, begin - self.at) :])
            self.at += len(chunk)
            if may_stop and self.at >= TRIAL_BYTES:
                left_s = (self.stop - self.at) / self.at * (time.monotonic() - started_s)
                if left_s > SLOW_S:
                    return
                may_stop = False
        if self.at != self.stop:
            raise StoreUnavailable(f"{self._key}: the server sent less than it announced")

    def pour_piece(self, sink: Sink, piece: ByteRange, first: "_Answer") -> None:
        """Write the body to `sink`. It must be this `piece` of the object that `first` began."""
        self.check_same(first)
        if (self.at, self.stop) != (piece.start, piece.stop):
            raise StoreUnavailable(f"{self._key} changed while it was read")
        self.pour(sink)

    def _next(self) -> memoryview | None:
        assert self._chunks is not None, "closed"
        with mapped_errors(self._key):
            chunk = next(self._chunks, None)
        return None if chunk is None else memoryview(chunk)


class _RangesIgnored(StoreUnavailable):
    """The server answers a request for a part with the whole object."""


def offset_behind(key: str) -> str:
    """Return a text that sorts after the invalid `key` and before the next valid key.

    "": no valid key can follow. Pure.
    """
    invalid = _INVALID_PART.search(f"{key}/")
    begin = f"{key}/"[: invalid.end()] if invalid else key
    while begin:
        begin, last = begin[:-1], begin[-1]
        following = next((c for c in _LETTERS if c > last), "")
        if following:
            return begin + following
    return ""
