# SPDX-License-Identifier: Apache-2.0
"""Maps the exceptions of fsspec's filesystems, which may be of any class, to ours."""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Any, TypeVar

from ecshare.store.errors import (
    ObjectCorrupt,
    ObjectMissing,
    ObjectUnreadable,
    StoreBusy,
    StoreDenied,
    StoreUnavailable,
)
from ecshare.store.secrets import masked_text
from ecshare.store.statuses import CONFLICTS, Conflict, is_full, may_pass, says_exists

T = TypeVar("T")

_LONGEST_WORDS = 300
# Codes about one object: S3 has moved it to an archive, or it is shorter than expected.
_UNUSABLE = {"InvalidObjectState", "InvalidRange"}
_NO_BUCKET = "NoSuchBucket"
# Codes of S3, and names of classes of clients' errors, which are not builtins.
_BUSY = {
    "ConnectTimeoutError", "ConnectionClosedError", "ConnectionResetError", "FSTimeoutError",
    "InternalError", "ReadTimeoutError", "ServerDisconnectedError", "ServiceUnavailable",
    "SlowDown", "TimeoutError",
}  # fmt: skip
_DENIED = {
    "AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "NoCredentialsError",
    "PartialCredentialsError", "SignatureDoesNotMatch", "403",
}  # fmt: skip


@contextlib.contextmanager
def mapped_errors(key: str, *, finds: bool = True) -> Iterator[None]:
    """Turn any error of a filesystem in the body into those of ecshare; see statuses.py.

    `finds`: the request is for an object that may be missing. A write is not.

    Raises:
        ObjectMissing: there is no such object.
        ObjectUnreadable: it is a folder.
        ObjectCorrupt: this one object cannot be read.
        Conflict: the store did nothing, because of another request or object.
        StoreDenied: credentials or permissions forbid it.
        StoreBusy: the fault may pass.
        StoreUnavailable: any other error.
    """
    try:
        yield
    except StoreUnavailable:
        raise
    # Filesystems, and the clients below them, are third-party code and may raise any class.
    except Exception as exc:
        raise _meant(exc, key, finds=finds) from exc


async def answered(key: str, call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `call`, a request for one object. After a conflict, repeat it once.

    Raises:
        StoreError: see `mapped_errors`.
    """
    with contextlib.suppress(Conflict), mapped_errors(key):
        return await call()
    with mapped_errors(key):
        return await call()


def _meant(exc: Exception, key: str, *, finds: bool) -> Exception:
    code, status = _code(exc), _status(exc)
    if code == _NO_BUCKET:
        return StoreUnavailable("the bucket does not exist; make it first, or name another")
    if finds and (isinstance(exc, FileNotFoundError) or status == HTTPStatus.NOT_FOUND):
        return ObjectMissing(f"no object {key}")
    if isinstance(exc, IsADirectoryError):
        return ObjectUnreadable(f"{key} cannot be read: {_words(exc)}")
    if code in _UNUSABLE:
        return ObjectCorrupt(f"corrupt object: {key}: {_words(exc)}")
    words = f"the store failed: {type(exc).__name__}: {_words(exc)}"
    if is_full(code):
        return StoreBusy(words)
    if isinstance(exc, PermissionError) or code in _DENIED:
        return StoreDenied(f"the store refuses us: {_words(exc)}")
    if isinstance(exc, FileExistsError) or status in CONFLICTS:
        # FileExistsError counts only if the filesystem did not translate it from a server's answer.
        exists = says_exists(status, code) if status else isinstance(exc, FileExistsError)
        return Conflict(words, says_exists=exists)
    is_busy = may_pass(status) or {code, type(exc.__cause__).__name__} & _BUSY
    return (StoreBusy if is_busy else StoreUnavailable)(words)


def _words(exc: Exception) -> str:
    """Return the message of `exc`, masked and short: a client may quote all that a server sent."""
    return masked_text(" ".join(str(exc).split()))[:_LONGEST_WORDS]


def _response(exc: BaseException) -> dict[str, Any]:
    """Return the answer of S3 behind an exception of s3fs, whose own message is hardly more than
    EINVAL."""
    for each in (exc.__cause__, exc.__context__, exc):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            return response
    return {}


def _code(exc: BaseException) -> str:
    """Return the code in S3's answer; for any other error, the name of its class."""
    return str(_response(exc).get("Error", {}).get("Code", type(exc).__name__))


def _status(exc: BaseException) -> int | None:
    """Return the HTTP status behind an exception; None if its client does not report it."""
    status = _response(exc).get("ResponseMetadata", {}).get("HTTPStatusCode")
    # The names in exceptions of adlfs, gcsfs and aiohttp.
    found = (status, *(getattr(exc, name, None) for name in ("status_code", "code", "status")))
    return next((each for each in found if isinstance(each, int)), None)
