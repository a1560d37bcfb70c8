# SPDX-License-Identifier: Apache-2.0
"""What obstore's exceptions mean: it has few classes, and says the rest in words."""

import contextlib
import re
from collections.abc import Iterator

from obstore import exceptions as foreign

from ecshare.store.errors import (
    ObjectCorrupt,
    ObjectMissing,
    StoreBusy,
    StoreDenied,
    StoreUnavailable,
)
from ecshare.store.secrets import masked_text

_LONGEST_SHOWN = 200
_SERVER_ERRORS = range(500, 600)
_TOO_MANY_REQUESTS = 429
# obstore's own words for what became of a request that got no answer.
_NO_ANSWER = re.compile(r"kind: (?:Timeout|Interrupted),|IncompleteMessage")
_INVALID_KEY = re.compile(
    r'invalid path: (?:Error parsing )?Path "(.*?)"(?: contained|: )', re.DOTALL
)
_STATUS = re.compile(r"status code: (\d{3})")
_ANSWER = re.compile(r"<Code>(\w+)</Code>\s*(?:<Message>([^<]{0,300}))?")
_DENIED = {
    "AccessDenied", "AccountProblem", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId",
    "InvalidAuthenticationInfo", "InvalidToken", "PublicAccessNotPermitted",
    "RequestTimeTooSkewed", "SignatureDoesNotMatch",
}  # fmt: skip

_NO_BUCKET = {"NoSuchBucket": "bucket", "ContainerNotFound": "container"}
_ARCHIVED = {"BlobArchived", "BlobBeingRehydrated", "InvalidObjectState"}
# Azure answers 409 to more than a create-only write of what is there.
_OTHER_CONFLICTS = _ARCHIVED | {
    "AccountBeingCreated", "ContainerBeingDeleted", "ContainerDisabled", "PublicAccessNotPermitted",
}  # fmt: skip

# Answered with 400 too, but it says nothing about what the server understands.
_BROKEN_ON_THE_WAY = {
    "BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
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

FOREIGN = (foreign.BaseError, OSError, NotImplementedError)
"""What obstore may raise."""


class InvalidKey(StoreUnavailable):
    """A page of a listing contains `key`, which obstore refuses, and the page with it."""

    def __init__(self, key: str) -> None:
        super().__init__(f"a listing contains the invalid key {ascii(key)[:_LONGEST_SHOWN]}")
        self.key = key


class Misunderstood(StoreUnavailable):
    """The server does not know this kind of request."""


@contextlib.contextmanager
def mapped_errors(key: str) -> Iterator[None]:
    """Turn what obstore raises into the errors of ecshare.

    FileExistsError passes: it is the answer to a create-only write.
    """
    try:
        yield
    except FOREIGN as exc:
        raise _meant(exc, key) from exc


def _meant(exc: Exception, key: str) -> Exception:
    meaning = next(MEANING[kind] for kind in (*type(exc).__mro__, OSError) if kind in MEANING)
    status, answer = status_of(exc), _ANSWER.search(str(exc))
    code = answer[1] if answer else ""
    if isinstance(exc, foreign.InvalidPathError) and (invalid := _INVALID_KEY.search(str(exc))):
        return InvalidKey(invalid[1])
    # obstore has one class for everything a listing may suffer, and one for both kinds of 404.
    if code in _NO_BUCKET:
        what = _NO_BUCKET[code]
        return StoreUnavailable(f"the {what} does not exist; make it first, or name another")
    if meaning is ObjectMissing:
        return ObjectMissing(f"no object {key}")
    if meaning is FileExistsError and code not in _OTHER_CONFLICTS:
        return FileExistsError(key)
    if answer:
        message = (answer[2] or "").partition("\n")[0].strip()  # Azure's goes on with a number
        words = f"the store answered {status} {code}: {message or 'no more'}"
    else:
        words = str(exc).partition("\n")[0]
    words = masked_text(words)
    if code in _ARCHIVED:  # of no use to anybody
        return ObjectCorrupt(f"{key} cannot be read: {words}")
    if meaning is StoreDenied or status in (401, 403) or code in _DENIED:
        return StoreDenied(words)
    if code in _BROKEN_ON_THE_WAY:
        return StoreUnavailable(words)
    if status in (400, 405, 501) or isinstance(
        exc, NotImplementedError | foreign.NotSupportedError
    ):
        return Misunderstood(words)
    return StoreBusy(words) if _may_pass(exc, status) else StoreUnavailable(words)


def _may_pass(exc: Exception, status: int | None) -> bool:
    if status is None:
        return bool(_NO_ANSWER.search(str(exc)))
    return status in _SERVER_ERRORS or status == _TOO_MANY_REQUESTS


def status_of(exc: BaseException | None) -> int | None:
    """Return the HTTP status in the words of obstore's exception, if there is one."""
    found = _STATUS.search(str(exc))
    return int(found[1]) if found else None
