# SPDX-License-Identifier: Apache-2.0
"""What the exceptions of fsspec's filesystems mean. Any class may come."""

import contextlib
from collections.abc import Iterator

from ecshare.store.errors import (
    ObjectCorrupt,
    ObjectMissing,
    ObjectUnreadable,
    StoreBusy,
    StoreDenied,
    StoreUnavailable,
)
from ecshare.store.secrets import masked_text

_LONGEST_WORDS = 300
_CREATE_REFUSED = {"PreconditionFailed", "ConditionalRequestConflict", "412"}
# Of one object: S3 has moved it to an archive; it is shorter than expected.
_UNUSABLE = {"InvalidObjectState", "InvalidRange"}
_NO_BUCKET = "NoSuchBucket"
# Whatever the class of the client's error: none of its many is among the builtins.
_BUSY = {
    "ConnectTimeoutError", "ConnectionClosedError", "ConnectionResetError", "FSTimeoutError",
    "InternalError", "ReadTimeoutError", "ServerDisconnectedError", "ServiceUnavailable",
    "SlowDown", "TimeoutError",
}  # fmt: skip
_SERVER_ERRORS = range(500, 600)
_DENIED = {
    "AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "NoCredentialsError",
    "PartialCredentialsError", "SignatureDoesNotMatch", "403",
}  # fmt: skip


@contextlib.contextmanager
def mapped_errors(key: str) -> Iterator[None]:
    """Turn any error of a filesystem in the body into those of ecshare.

    Raises:
        FileExistsError: a create-only write found the object.
        ObjectMissing: there is no such object.
        ObjectUnreadable: it is a folder.
        ObjectCorrupt: this one object cannot be read.
        StoreDenied: credentials or permissions forbid it.
        StoreBusy: the fault may pass.
        StoreUnavailable: any other error.
    """
    try:
        yield
    except StoreUnavailable:
        raise
    except FileNotFoundError as exc:
        if _code(exc) == _NO_BUCKET:
            words = "the bucket does not exist; make it first, or name another"
            raise StoreUnavailable(words) from exc
        raise ObjectMissing(f"no object {key}") from exc
    except FileExistsError:
        raise
    except Exception as exc:
        # Any class may come: filesystems are third-party code over third-party clients.
        if isinstance(exc, IsADirectoryError):
            raise ObjectUnreadable(f"{key} cannot be read: {_words(exc)}") from exc
        if _code(exc) in _UNUSABLE:
            raise ObjectCorrupt(f"corrupt object: {key}: {_words(exc)}") from exc
        if _code(exc) in _CREATE_REFUSED:
            raise FileExistsError(key) from exc
        if isinstance(exc, PermissionError) or _code(exc) in _DENIED:
            raise StoreDenied(f"the store refuses us: {_words(exc)}") from exc
        words = f"the store failed: {type(exc).__name__}: {_words(exc)}"
        raise (StoreBusy if _may_pass(exc) else StoreUnavailable)(words) from exc


def _may_pass(exc: Exception) -> bool:
    for each in (exc.__cause__, exc):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if status in _SERVER_ERRORS:
                return True
    return bool({_code(exc), type(exc.__cause__).__name__} & _BUSY)


def _words(exc: Exception) -> str:
    """What it says, as far as it suits a log: a client may quote all that a server sent."""
    return masked_text(" ".join(str(exc).split()))[:_LONGEST_WORDS]


def _code(exc: BaseException) -> str:
    """The S3 error code behind an exception of s3fs, which itself says little more than EINVAL."""
    response = getattr(exc.__cause__, "response", None) or getattr(exc, "response", None)
    error = response.get("Error", {}) if isinstance(response, dict) else {}
    return str(error.get("Code", type(exc).__name__))
