# SPDX-License-Identifier: Apache-2.0
"""Objects in S3 through obstore: the fast road.

obstore's blocking calls in our own threads cost less than half the CPU of its coroutines, and
an eighth to a thirtieth of what s3fs costs. Bodies go out as they lie in memory, without a copy,
and come in as obstore received them; only what takes several requests is copied together.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import obstore
from obstore import exceptions as foreign
from obstore.store import S3Store

from ecshare.store.errors import ObjectMissing, StoreDenied, StoreUnavailable
from ecshare.store.keys import check_key, is_safe_key
from ecshare.store.objects import Buffer, ObjectInfo, Sink
from ecshare.store.s3options import S3Plan
from ecshare.store.threads import Threads

if TYPE_CHECKING:
    from obstore.store import BackoffConfig

logger = logging.getLogger(__name__)

# One request for more costs twice the CPU a byte: fresh pages for the whole of it, every time.
# A bit over 8 MB, so that a tensor of 8 MB with its prologue takes one round trip, not two.
PIECE_BYTES = (8 << 20) + (64 << 10)
_REQUESTS = 32  # at once: what small objects need at 20 ms of round trip
_PIECES = 4  # of one object at once
_RETRIES = 2
_BACKOFF: "BackoffConfig" = {
    "init_backoff": timedelta(milliseconds=50),
    "max_backoff": timedelta(seconds=1),
    "base": 2,
}
_CHUNK_BYTES = 1 << 20
_LISTED = 1000  # a page of S3

_STATUS = re.compile(r"status code: (\d{3})")
_ANSWER = re.compile(r"<Code>(\w+)</Code>\s*(?:<Message>([^<]{0,300}))?")
_DENIED = {
    "AccessDenied", "AccountProblem", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId",
    "InvalidToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch",
}  # fmt: skip

MEANING: dict[type[Exception], type[Exception]] = {
    foreign.AlreadyExistsError: FileExistsError,
    foreign.PreconditionError: FileExistsError,
    foreign.NotFoundError: ObjectMissing,
    FileNotFoundError: ObjectMissing,
    foreign.PermissionDeniedError: StoreDenied,
    foreign.UnauthenticatedError: StoreDenied,
    foreign.GenericError: StoreUnavailable,
    foreign.InvalidPathError: StoreUnavailable,
    foreign.JoinError: StoreUnavailable,
    foreign.NotModifiedError: StoreUnavailable,
    foreign.NotSupportedError: StoreUnavailable,
    foreign.UnknownConfigurationKeyError: StoreUnavailable,
    NotImplementedError: StoreUnavailable,
    OSError: StoreUnavailable,
}
"""What each exception of obstore, and each builtin that it raises, becomes here."""

_FOREIGN = (foreign.BaseError, OSError, NotImplementedError)


def open_cloud(plan: S3Plan, io_timeout_s: float) -> "CloudObjects":
    """Return the store that `plan` describes. Touches no network."""
    limit = timedelta(seconds=io_timeout_s)

    client: Any = {
        **plan.client,
        "timeout": limit,
        "connect_timeout": min(limit, timedelta(seconds=5)),
    }

    def bucket(**extra: Any) -> S3Store:
        config: Any = {**plan.config, **extra}
        credentials: Any = plan.credentials
        return S3Store(
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

    return CloudObjects(
        bucket(disable_bulk_delete=True),
        checked=bucket(checksum_algorithm="crc64nvme"),
        io_timeout_s=io_timeout_s,
    )


class CloudObjects:
    """An ObjectStore in one bucket.

    Ownership: `_puts` and `_ranges` are what was learnt about the server, and are only ever
    lowered; a thread that acts on the older value repeats the lesson, no more.
    """

    def __init__(self, plain: S3Store, *, checked: S3Store, io_timeout_s: float) -> None:
        self._plain = plain
        self._checked = checked
        # How to write, from the best way to the one that every server understands.
        self._puts: Sequence[tuple[S3Store, Literal["create", "overwrite"]]]
        self._puts = [(checked, "create"), (plain, "create"), (plain, "overwrite")]
        self._ranges = True
        self._threads = Threads("cloud", _REQUESTS, io_timeout_s)

    async def get(self, key: str, sink: Sink) -> None:
        """See ObjectStore."""
        first = await self._threads.run(self._first, check_key(key), sink)
        lanes = asyncio.Semaphore(_PIECES)

        async def fetch(start: int) -> None:
            async with lanes:
                await self._threads.run(self._piece, key, start, first, sink)

        await asyncio.gather(*(fetch(n) for n in range(first.stop, first.size, PIECE_BYTES)))

    async def put(self, key: str, body: Buffer, file: str | None = None) -> bool:
        """See ObjectStore. Where the server ignores create-only, True also for a second write."""
        del file
        return await self._threads.run(self._put, check_key(key), body)

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        """See ObjectStore."""
        return await self._threads.each(self._exists, [check_key(key) for key in keys])

    async def delete(self, keys: Sequence[str]) -> None:
        """See ObjectStore."""
        if keys:
            await self._threads.run(self._delete, [check_key(key) for key in keys])

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See ObjectStore."""
        below = check_key(prefix.removesuffix("/")) if prefix else None
        pages = obstore.list(self._plain, below, chunk_size=_LISTED)
        while page := await self._threads.run(_next_page, pages):
            for meta in page:
                if is_safe_key(meta["path"]):
                    yield ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())

    async def close(self) -> None:
        """See ObjectStore."""
        self._threads.close()

    # What follows runs in the store's threads.

    def _first(self, key: str, sink: Sink) -> "_Piece":
        """The beginning of an object, and its size: no HEAD is needed to learn it."""
        first = self._ask_first(key)
        sink.begin(first.size)
        if not (first.start == 0 <= first.stop <= first.size):
            raise StoreUnavailable(f"{key}: the server answered with another range")
        first.pour(key, sink)
        return first

    def _ask_first(self, key: str) -> "_Piece":
        with mapped_errors(key):
            if self._ranges:
                try:
                    return _Piece(
                        obstore.get(self._plain, key, options={"range": (0, PIECE_BYTES)})
                    )
                except foreign.GenericError as exc:
                    if "non-partial response" in str(exc):
                        self._ranges = False
                        logger.info("the S3 server ignores ranges: objects are fetched whole")
                    elif _status(exc) != 416:  # an empty object has no first byte
                        raise
            return _Piece(obstore.get(self._plain, key))

    def _piece(self, key: str, start: int, first: "_Piece", sink: Sink) -> None:
        stop = min(start + PIECE_BYTES, first.size)
        with mapped_errors(key):
            piece = _Piece(obstore.get(self._plain, key, options={"range": (start, stop)}))
        if (piece.size, piece.version, piece.start, piece.stop) != (
            first.size,
            first.version,
            start,
            stop,
        ):
            raise StoreUnavailable(f"{key} changed while it was read")
        piece.pour(key, sink)

    def _put(self, key: str, body: Buffer) -> bool:
        for n, (store, mode) in enumerate(ways := self._puts):
            try:
                with mapped_errors(key):
                    # One request: in parts it would be three, and some servers forget create-only.
                    obstore.put(store, key, memoryview(body), use_multipart=False, mode=mode)
            except FileExistsError:
                return False
            except _Misunderstood:
                if n == len(ways) - 1:
                    raise
                continue
            if n:
                self._puts = ways[n:]
                logger.info("the S3 server refuses checksums or create-only writes: doing without")
            return True
        raise AssertionError("the last way returns or raises")

    def _exists(self, key: str) -> bool:
        try:
            with mapped_errors(key):
                obstore.head(self._plain, key)
        except ObjectMissing:
            return False
        return True

    def _delete(self, keys: Sequence[str]) -> None:
        try:
            with mapped_errors(keys[0]):
                obstore.delete(self._checked, keys)
        except ObjectMissing:
            return
        except _Misunderstood:
            # Some servers know no request that deletes many; this store asks for one at a time.
            with contextlib.suppress(ObjectMissing), mapped_errors(keys[0]):
                obstore.delete(self._plain, keys)


class _Piece:
    """The answer to one GET: its headers are here, its body is on the way."""

    def __init__(self, answer: "obstore.GetResult") -> None:
        self._answer = answer
        self.size = answer.meta["size"]
        self.version = answer.meta["e_tag"]
        self.start, self.stop = answer.range

    def pour(self, key: str, sink: Sink) -> None:
        """Give the body to `sink` as it comes in."""
        at = self.start
        chunks = self._answer.stream(min_chunk_size=_CHUNK_BYTES)
        while True:
            with mapped_errors(key):
                chunk = next(chunks, None)
            if chunk is None:
                break
            part = memoryview(chunk)
            if at + len(part) > self.stop:
                raise StoreUnavailable(f"{key}: the server sent more than it announced")
            sink.write(at, part)
            at += len(part)
        if at != self.stop:
            raise StoreUnavailable(f"{key}: the server sent less than it announced")


class _Misunderstood(StoreUnavailable):
    """The server does not know this kind of request."""


@contextlib.contextmanager
def mapped_errors(key: str) -> Iterator[None]:
    """Turn what obstore raises into the errors of ecshare.

    FileExistsError passes: it is the answer to a create-only write.
    """
    try:
        yield
    except _FOREIGN as exc:
        raise _meant(exc, key) from exc


def _meant(exc: Exception, key: str) -> Exception:
    meaning = next(MEANING[kind] for kind in (*type(exc).__mro__, OSError) if kind in MEANING)
    status, answer = _status(exc), _ANSWER.search(str(exc))
    code = answer[1] if answer else ""
    # obstore has one class for everything a listing may suffer, and one for both kinds of 404.
    if code == "NoSuchBucket":
        return StoreUnavailable("the bucket does not exist; make it first, or name another")
    if meaning is ObjectMissing:
        return ObjectMissing(f"no object {key}")
    if meaning is FileExistsError:
        return FileExistsError(key)
    if answer:
        words = f"S3 answered {status} {code}: {answer[2] or 'no more'}"
    else:
        words = str(exc).partition("\n")[0]
    if meaning is StoreDenied or status in (401, 403) or code in _DENIED:
        return StoreDenied(words)
    if status in (400, 405, 501) or isinstance(
        exc, NotImplementedError | foreign.NotSupportedError
    ):
        return _Misunderstood(words)
    return StoreUnavailable(words)


def _status(exc: Exception) -> int | None:
    found = _STATUS.search(str(exc))
    return int(found[1]) if found else None


def _next_page(pages: Any) -> Sequence[Any]:
    with mapped_errors("a listing"):
        return next(pages, [])
