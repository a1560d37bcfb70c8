# SPDX-License-Identifier: Apache-2.0
"""A store in any fsspec filesystem; not optimised for speed.

Asynchronous filesystems (s3fs, gcsfs, adlfs, ...) run on the event loop that calls this store;
the others (memory, sftp, smb, ...) in a few threads.
"""

import asyncio
import base64
import contextlib
import inspect
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import fsspec

from ecshare.store.cloud_accounts import CLOUDS, S3, CloudOptions
from ecshare.store.config import StoreConfig, suggestion
from ecshare.store.errors import (
    ConfigError,
    ObjectMissing,
    ObjectUnreadable,
    StoreUnavailable,
)
from ecshare.store.fsspec.errors import answered, mapped_errors
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
from ecshare.store.secrets import masked_text, masked_url
from ecshare.store.statuses import Conflict
from ecshare.store.threads import Threads, gather_all

# The packages for the clouds. For other protocols, fsspec's own message names them.
_NEEDS = {
    "s3": "obstore: pip install obstore botocore (ecshare's extra [s3])",
    "azure": "obstore: pip install obstore (ecshare's extra [azure])",
    "gcs": "obstore: pip install obstore (ecshare's extra [gcs])",
}
# With these protocols a PUT is atomic. With others, a writer that dies would leave half a file
# under the final name, so objects are written to a temporary file and moved.
_ATOMIC = {"memory", *CLOUDS, "adl", "oci", "oss", "hf"}
_PIECE_BYTES = 8 << 20
_LOOK_UPS = 32  # in flight
_WRITES = {"makedirs", "mv", "pipe_file", "rm_file"}  # the methods that this module calls to write
_CONNECTIONS = 80  # more than are needed at once: saves that hang leave enough for loads
_LONGEST_WORDS = 300
_Page = list[dict[str, Any]]  # lines of a listing, as fsspec has them
# A server may send pages, and a filesystem nested folders, without end.
MOST_PAGES = 10_000
_MOST_LEVELS = 8  # see keys.py


def open_fsspec(config: StoreConfig, path: str, reason: str = "") -> "FsspecStore":
    """Return the store of `config.url`, opened by fsspec.

    `path`: where the user wrote the options. `reason`: why obstore cannot open it, if it was
    considered; then an error names only fsspec's package.

    Raises:
        ConfigError: a package is missing, or the url or an option is wrong.
    """
    protocol = config.url.partition("://")[0]
    _check_port(config.url, f"{path}.url")
    filesystem_class = _filesystem_class(protocol, path, reason)
    cloud = CLOUDS.get(protocol)
    if cloud is not None:
        _check_known(config.storage_options, filesystem_class, cloud, path)
    options: dict[str, Any] = dict(config.storage_options)
    if cloud is S3:
        options |= _for_s3fs(config)
    if filesystem_class.async_impl:
        options["asynchronous"] = True
    try:
        # A cached listing would hide objects that other engines have stored. A cached filesystem
        # may belong to another event loop.
        filesystem, root = fsspec.core.url_to_fs(
            config.url, use_listings_cache=False, skip_instance_cache=True, **options
        )
    except Exception as exc:  # noqa: BLE001 — third-party code may raise any class
        words = masked_text(f"{type(exc).__name__}: {exc}", config.secrets())[:_LONGEST_WORDS]
        # `from None`: the original message may quote a secret.
        raise ConfigError(
            f"{path}.storage_options: {protocol} does not open with these options ({words})"
        ) from None
    return FsspecStore(filesystem, root, atomic_writes=protocol in _ATOMIC)


def _check_port(url: str, option: str) -> None:
    """Check the port of `url`. fsspec's own error could quote a password.

    Raises:
        ConfigError: the port is not a number.
    """
    try:
        _ = urlsplit(url).port
    except ValueError:
        raise ConfigError(
            f"{option}: {masked_url(url)!r} has an invalid host or port; write "
            "protocol://user@host:port/path, and a password into storage_options"
        ) from None


def _check_known(
    options: Mapping[str, Any], filesystem_class: Any, cloud: CloudOptions, path: str
) -> None:
    """Check that the filesystem knows all `options`: some filesystems ignore unknown ones.

    Raises:
        ConfigError: it does not know one. The message names it and a similar known one.
    """
    parameters = (inspect.signature(each.__init__).parameters for each in filesystem_class.__mro__)
    known = {"profile"}.union(*parameters) - {"self", "args", "kwargs", "storage_options"}
    for name in sorted(options.keys() - known):
        same = [alias for alias, own in cloud.aliases.items() if own == cloud.read_as(name)]
        fix = f"write {same[0]}" if same else suggestion(name, sorted({*known, *cloud.aliases}))
        raise ConfigError(
            f"{path}.storage_options.{name}: {cloud.client}, which opens this store, does not "
            f"know it; {fix}"
        )


def _for_s3fs(config: StoreConfig) -> dict[str, Any]:
    """Return options for s3fs: one round trip for a GET, and the user's timeout, not a minute."""
    limits = {"connect_timeout": min(config.io_timeout_s, 5), "read_timeout": config.io_timeout_s}
    given: Any = config.storage_options.get("config_kwargs") or {}
    return {
        # Above 1, s3fs sends a HEAD before each GET to size the object.
        "max_concurrency": 1,
        # s3fs itself tries each call five times.
        "config_kwargs": {
            **limits,
            "max_pool_connections": _CONNECTIONS,
            "retries": {"total_max_attempts": 1},
            **given,
        },
    }


def _filesystem_class(protocol: str, path: str, reason: str) -> Any:
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as exc:
        cloud = CLOUDS.get(protocol)
        if cloud and reason:
            extra = " (ecshare's extra [s3fs])" if cloud is S3 else ""
            needed = f"{cloud.client}: pip install {cloud.client}{extra}"
            raise ConfigError(f"{path}: {reason}; that needs {needed}") from exc
        needed = _NEEDS[cloud.name] if cloud else f"a package that is missing: {exc}"
        raise ConfigError(f"{path}.url: {protocol}:// needs {needed}") from exc
    except ValueError as exc:
        known = [*fsspec.available_protocols()]
        raise ConfigError(
            f"{path}.url: unknown protocol {protocol!r}; {suggestion(protocol, known)}"
        ) from exc


class FsspecStore:
    """An ObjectStore below one path of an fsspec filesystem."""

    def __init__(self, filesystem: Any, root: str, *, atomic_writes: bool) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._atomic_writes = atomic_writes
        self._s3 = hasattr(filesystem, "_call_s3")  # s3fs, or a subclass
        self._threads = Threads("remote", 8)
        self._saving = Threads("remote-save", 8)
        self._is_closed = False
        pipe = filesystem._pipe_file if filesystem.async_impl else filesystem.pipe_file
        parameters = inspect.signature(pipe).parameters
        self._create_only = {"mode": "create"} if "mode" in parameters else {}

    @property
    def creates_once(self) -> bool:
        """See ObjectStore. A filesystem that ignores create-only, or that checks before it writes,
        is not detected."""
        return self._atomic_writes and bool(self._create_only)

    @property
    def serves_many(self) -> bool:
        """See ObjectStore."""
        return False

    async def get(self, key: Key, sink: Sink) -> None:
        """See ObjectStore."""
        path = self._path(key)
        if self._s3:
            await self._stream(key, path, sink)
            return
        info = await self._ask(key, "info", path)
        if info.get("type") == "directory":
            raise ObjectUnreadable(f"{key} is not a file")
        size = info.get("size")
        if not isinstance(size, int):
            raise StoreUnavailable(f"{key}: the filesystem does not say how large it is")
        sink.begin(size)
        for part in cut(ByteRange(0, size), _PIECE_BYTES):
            piece = await self._ask(key, "cat_file", path, start=part.start, end=part.stop)
            await self._write_piece(key, sink, part.start, piece, part.stop)

    async def _stream(self, key: Key, path: str, sink: Sink) -> None:
        """Fetch an object by one request: the answer's headers contain the size."""
        bucket, name, _ = self._fs.split_path(path)
        ask = partial(self._fs._call_s3, "get_object", Bucket=bucket, Key=name)
        answer = await answered(key, ask)
        body, size = answer["Body"], answer.get("ContentLength")
        try:
            if not isinstance(size, int):
                raise StoreUnavailable(f"{key}: the server does not say how large it is")
            if answer.get("ContentRange"):
                raise StoreUnavailable(f"{key}: the server sends a part of it, unasked")
            sink.begin(size)
            await self._pour(key, body, size, sink)
        finally:
            body.close()  # a body that was not read to its end would keep the connection

    async def _pour(self, key: Key, body: Any, size: int, sink: Sink) -> None:
        start = 0
        while start < size:
            with mapped_errors(key):
                piece = await body.read(min(_PIECE_BYTES, size - start))
            if not piece:
                raise StoreUnavailable(f"{key}: the server sent less than it announced")
            await self._write_piece(key, sink, start, piece, start + len(piece))
            start += len(piece)

    async def _write_piece(self, key: Key, sink: Sink, start: int, piece: bytes, stop: int) -> None:
        if len(piece) != stop - start:
            raise StoreUnavailable(f"{key} has another size than the filesystem said")
        await self._threads.run(sink.write, start, piece)

    async def put(self, key: Key, body: Buffer, *, replace: bool = False) -> bool:
        """See ObjectStore."""
        path = self._path(key)
        # Most filesystems accept only bytes. This is the only copy that this store makes.
        value = body if isinstance(body, bytes) else bytes(body)
        create_only = self._create_only if self._atomic_writes and not replace else {}
        for is_last in (False, True):
            try:
                with mapped_errors(key, finds=False):
                    if self._atomic_writes:
                        await self._call("pipe_file", path, value, **create_only)
                    else:
                        await self._write_and_move(path, value)
            except Conflict as exc:
                if create_only and exc.says_exists:
                    return False
                with contextlib.suppress(StoreUnavailable):  # `exc` says more
                    if not replace and (await self.exists([key]))[0]:
                        return False
                if is_last:
                    raise
            else:
                return True
        raise AssertionError("the last attempt returns or raises")

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See ObjectStore."""
        limit = asyncio.Semaphore(_LOOK_UPS)

        async def one(key: Key) -> bool:
            path = self._path(key)
            try:
                async with limit:
                    # Not fsspec's `exists`: it returns False for a store that is down.
                    found = await self._ask(key, "info", path)
            except ObjectMissing:
                return False
            return bool(found.get("type", "file") == "file")

        return await gather_all(map(one, keys))

    async def stat(self, key: Key) -> ObjectStat:
        """See ObjectStore. s3fs and gcsfs report MD5s."""
        found = await self._ask(key, "info", self._path(key))
        size = found.get("size")
        if not isinstance(size, int):
            raise StoreUnavailable(f"{key}: the filesystem does not say how large it is")
        return ObjectStat(size, _md5(found))

    async def delete(self, keys: Sequence[Key]) -> None:
        """See ObjectStore."""
        for key in keys:
            with contextlib.suppress(ObjectMissing):
                await self._ask(key, "rm_file", self._path(key))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See ObjectStore. One page of S3, or one folder, is in memory at a time."""
        below = self._path(Key(prefix.removesuffix("/"))) if prefix else self._root
        pages = self._pages_of_s3(f"{below}/") if self._s3 else self._folders(below)
        async with contextlib.aclosing(pages):
            async for page in pages:
                for entry in page:
                    key = str(entry["name"]).removeprefix(self._root).lstrip("/")
                    if is_safe_key(key):
                        with mapped_errors(key):  # its size and date may be malformed
                            found = ObjectInfo(
                                Key(key), max(0, int(entry.get("size") or 0)), modified_s(entry)
                            )
                        yield found

    async def _pages_of_s3(self, below: str) -> AsyncGenerator[_Page, None]:
        """Yield page after page. s3fs's own method fetches all first, which may take minutes."""
        bucket, prefix, _ = self._fs.split_path(below)
        more: dict[str, str] = {}
        for _ in range(MOST_PAGES):
            with mapped_errors("a listing", finds=False):
                answer = await self._fs._call_s3(
                    "list_objects_v2", Bucket=bucket, Prefix=prefix, **more
                )
            yield [
                {"name": f"{bucket}/{each['Key']}", "size": each.get("Size"), **each}
                for each in answer.get("Contents") or ()
            ]
            token = answer.get("NextContinuationToken")
            if not token or self._is_closed:
                return
            more = {"ContinuationToken": token}
        raise StoreUnavailable(f"a listing has more than {MOST_PAGES:,} pages, or does not end")

    async def _folders(self, below: str) -> AsyncGenerator[_Page, None]:
        """Yield the files of each folder, level by level."""
        folders = [(below, _MOST_LEVELS)]
        while folders and not self._is_closed:
            folder, levels = folders.pop()
            entries: _Page = []
            with contextlib.suppress(ObjectMissing, NotADirectoryError), mapped_errors(folder):
                entries = await self._call("ls", folder, detail=True)
            # Some filesystems list the folder itself too, or its marker.
            own = [each for each in entries if str(each["name"]).strip("/") != folder.strip("/")]
            yield [each for each in own if each.get("type") == "file"]
            if levels > 1:
                folders += [
                    (str(each["name"]).rstrip("/"), levels - 1)
                    for each in own
                    if each.get("type") == "directory"
                ]

    async def has_root(self) -> bool:
        """Return whether the store's root folder exists; True if puts need no folders."""
        if self._atomic_writes:
            return True
        try:
            with mapped_errors("the store"):
                await self._call("info", self._root or "/")
        except ObjectMissing:
            return False
        return True

    async def close(self) -> None:
        """See ObjectStore."""
        self._is_closed = True
        self._threads.close()
        self._saving.close()
        session = getattr(self._fs, "_s3", None)  # s3fs keeps its connections there
        if session is not None:
            await session.__aexit__(None, None, None)

    def _path(self, key: Key) -> str:
        return f"{self._root}/{key}"

    async def _write_and_move(self, path: str, value: bytes) -> None:
        """Write to a temporary file, then move it. The last of several writers wins."""
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/.{name}.{secrets.token_hex(8)}.tmp"
        with contextlib.suppress(FileExistsError):
            await self._call("makedirs", folder, exist_ok=True)
        try:
            await self._call("pipe_file", temporary, value)
            await self._call("mv", temporary, path)
        except Exception:
            with contextlib.suppress(Exception):
                await self._call("rm_file", temporary)
            raise

    async def _ask(self, key: Key, verb: str, *args: object, **options: object) -> Any:
        """Call a method for one object, and once more after a conflict.

        Raises:
            StoreError: see `mapped_errors`.
        """
        return await answered(key, partial(self._call, verb, *args, **options))

    async def _call(self, verb: str, *args: object, **options: object) -> Any:
        """Call the filesystem's method `verb`, as a coroutine or in a thread."""
        method = getattr(self._fs, f"_{verb}", None) if self._fs.async_impl else None
        if method is None:
            threads = self._saving if verb in _WRITES else self._threads
            return await threads.run(partial(getattr(self._fs, verb), *args, **options))
        return await method(*args, **options)


def _md5(entry: dict[str, Any]) -> str:
    """Return the MD5 in an entry, "" if it has none: s3fs has it as ETag in hexadecimal digits,
    gcsfs as md5Hash in base64."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return md5_of_etag(base64.b64decode(entry["md5Hash"], validate=True).hex())
    return md5_of_etag(entry.get("ETag"))


def modified_s(entry: dict[str, Any]) -> float:
    """Return the time of the last write in an entry of a listing; 0.0: unknown.

    Every filesystem has its own name for it.
    """
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = entry.get(name)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return 0.0
