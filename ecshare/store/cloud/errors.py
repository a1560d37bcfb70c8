# SPDX-License-Identifier: Apache-2.0
"""Maps obstore's exceptions to ours: obstore has few classes, and details only in its messages."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from obstore import exceptions as foreign

from ecshare.store.errors import (
    ObjectCorrupt,
    ObjectMissing,
    StoreBusy,
    StoreDenied,
    StoreUnavailable,
)
from ecshare.store.secrets import masked_text
from ecshare.store.statuses import CONFLICTS, Conflict, is_full, may_pass, says_exists

T = TypeVar("T")

_LONGEST_SHOWN = 200
# The class of a failed assertion in obstore, such as when a server names an object to be deleted
# that it was not asked to delete. It is no Exception, and cannot be imported.
_PANIC = "PanicException"
# Parts of obstore's messages for requests that got no answer.
_NO_ANSWER = re.compile(r"kind: (?:Timeout|Interrupted),|IncompleteMessage")
_INVALID_KEY = re.compile(
    r'invalid path: (?:Error parsing )?Path "(.*?)"(?: contained|: )', re.DOTALL
)
_STATUS = re.compile(r"status code: (\d{3})((?: [A-Za-z-]+)*)")
_ASKED = re.compile(r"Error performing [A-Z]+ (https?://[^/\s]+)")
_ANSWER = re.compile(r"<Code>(?P<code>\w+)</Code>\s*(?:<Message>(?P<message>[^<]{0,300}))?")
# Of one of several objects to be deleted: the request itself was answered 200.
_KEPT = re.compile(
    r"DeleteObjects request failed for key \S+ (?P<message>.*) \(code: (?P<code>\w+)\)"
)
_DENIED = {
    "AccessDenied", "AccountProblem", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId",
    "InvalidAuthenticationInfo", "InvalidToken", "PublicAccessNotPermitted",
    "RequestTimeTooSkewed", "SignatureDoesNotMatch",
}  # fmt: skip

_NO_BUCKET = {"NoSuchBucket": "bucket", "ContainerNotFound": "container"}
_ARCHIVED = {"BlobArchived", "BlobBeingRehydrated", "InvalidObjectState"}

# Servers answer 400 for these too, but the request was damaged in transit: it says nothing about
# the kinds of requests that the server supports.
_DAMAGED_IN_TRANSIT = {
    "BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}  # fmt: skip

MEANING: dict[type[Exception], type[Exception]] = {
    foreign.AlreadyExistsError: Conflict,
    foreign.NotModifiedError: Conflict,
    foreign.PreconditionError: Conflict,
    foreign.NotFoundError: ObjectMissing,
    FileNotFoundError: ObjectMissing,
    foreign.PermissionDeniedError: StoreDenied,
    foreign.UnauthenticatedError: StoreDenied,
    foreign.GenericError: StoreUnavailable,
    foreign.InvalidPathError: StoreUnavailable,
    foreign.JoinError: StoreUnavailable,
    foreign.NotSupportedError: StoreUnavailable,
    foreign.UnknownConfigurationKeyError: StoreUnavailable,
    NotImplementedError: StoreUnavailable,
    OSError: StoreUnavailable,
}
"""Our class for each exception of obstore, and for each builtin that it raises."""

FOREIGN = (foreign.BaseError, OSError, NotImplementedError)
"""The exceptions that obstore may raise."""


class InvalidKey(StoreUnavailable):
    """A page of a listing contains `key`. obstore refuses it, and the whole page with it."""

    def __init__(self, key: str) -> None:
        super().__init__(f"a listing contains the invalid key {ascii(key)[:_LONGEST_SHOWN]}")
        self.key = key


class Misunderstood(StoreUnavailable):
    """The server does not support this kind of request."""


@contextlib.contextmanager
def mapped_errors(key: str, *, finds: bool = True) -> Iterator[None]:
    """Turn obstore's exceptions into ours; see statuses.py.

    `finds`: the request is for an object that may be missing. A PUT, or a listing, is not.

    Raises:
        StoreError: obstore has failed.
    """
    try:
        yield
    except FOREIGN as exc:
        raise _meant(exc, key, finds=finds) from exc
    except BaseException as exc:
        if type(exc).__name__ != _PANIC:
            raise
        raise StoreUnavailable(f"obstore cannot read the store's answer about {key}") from None


def answered(key: str, call: Callable[[], T]) -> T:
    """Return the result of `call`, a request for one object. After a conflict, repeat it once.

    Raises:
        StoreError: see `mapped_errors`.
    """
    with contextlib.suppress(Conflict), mapped_errors(key):
        return call()
    with mapped_errors(key):
        return call()


def _meant(exc: Exception, key: str, *, finds: bool) -> Exception:
    meaning = next(MEANING[kind] for kind in (*type(exc).__mro__, OSError) if kind in MEANING)
    status, answer = status_of(exc), _ANSWER.search(str(exc)) or _KEPT.search(str(exc))
    code = answer["code"] if answer else ""
    if isinstance(exc, foreign.InvalidPathError) and (invalid := _INVALID_KEY.search(str(exc))):
        return InvalidKey(invalid[1])
    # obstore has one class for all errors of listings, and one for both kinds of 404.
    if code in _NO_BUCKET:
        what = _NO_BUCKET[code]
        return StoreUnavailable(f"the {what} does not exist; make it first, or name another")
    if meaning is ObjectMissing and finds:
        return ObjectMissing(f"no object {key}")
    words = _words(exc, status, answer)
    if is_full(code):
        return StoreBusy(words)
    if code in _ARCHIVED:  # no engine can read it
        return ObjectCorrupt(f"{key} cannot be read: {words}")
    if meaning is StoreDenied or status in (401, 403) or code in _DENIED:
        return StoreDenied(words)
    if meaning is Conflict or status in CONFLICTS:
        return Conflict(words, says_exists=says_exists(status, code))
    if code in _DAMAGED_IN_TRANSIT:
        return StoreUnavailable(words)
    if status in (400, 405, 501) or isinstance(
        exc, NotImplementedError | foreign.NotSupportedError
    ):
        return Misunderstood(words)
    passes = bool(_NO_ANSWER.search(str(exc))) if status is None else may_pass(status)
    return StoreBusy(words) if passes else StoreUnavailable(words)


def _words(exc: Exception, status: int | None, answer: re.Match[str] | None) -> str:
    """Return a message for users: the server and its answer, or obstore's own message."""
    text = str(exc)
    # Without a url if it is signed: obstore then leaves it out.
    store = f"the store at {asked[1]}" if (asked := _ASKED.search(text)) else "the store"
    if answer:
        message = (answer["message"] or "").partition("\n")[0].strip()  # Azure appends ids
        said = f"{status} {answer['code']}" if status else answer["code"]
        words = f"{store} answered {said}: {message or 'no more'}"
    elif found := _STATUS.search(text):
        words = f"{store} answered {found[1]}{found[2]}"
    else:
        words = text.partition("\n")[0]
    return masked_text(words)


def status_of(exc: BaseException | None) -> int | None:
    """Return the HTTP status in the message of obstore's exception, if there is one."""
    found = _STATUS.search(str(exc))
    return int(found[1]) if found else None
