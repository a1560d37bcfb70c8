# SPDX-License-Identifier: Apache-2.0
"""What the HTTP status of a refusal means, for every client library and every cloud.

| status                               | request           | meaning                              |
|--------------------------------------|-------------------|--------------------------------------|
| 412 PreconditionFailed (S3, Google), | create-only PUT   | the object exists                    |
| 409 BlobAlreadyExists (Azure)        |                   |                                      |
| any other 304, 409 or 412            | any               | `Conflict`: nothing was done         |
| 404                                  | GET, HEAD, DELETE | there is no such object              |
| 404                                  | PUT, listing      | there is no place for objects        |
| 408, 425, 429, 5xx                   | any               | the store is busy: this may pass     |

401 and 403 are denials. Every other status says that the request, or the server, is wrong.

A client library has one class for each status, whatever was asked: it calls a GET that was answered
409 "already exists". So what a refusal means is decided here. Pure.
"""

from ecshare.store.errors import StoreBusy

CONFLICTS = frozenset({304, 409, 412})
_PASSING = frozenset({408, 425, 429, *range(500, 600)})
_EXISTS = frozenset({(412, "PreconditionFailed"), (409, "BlobAlreadyExists")})


class Conflict(StoreBusy):
    """The store did nothing, because something else was in the way. Who asks again may succeed."""

    def __init__(self, words: str, *, says_exists: bool = False) -> None:
        """`says_exists`: in answer to a create-only PUT this proves that the object exists."""
        super().__init__(words)
        self.says_exists = says_exists


def says_exists(status: int | None, code: str) -> bool:
    """Whether this answer to a create-only PUT proves that the object exists.

    `code`: the server's own word for it. Other servers say 409 for it too, but 409 may as well mean
    that another request was in the way, so it proves nothing.
    """
    return (status, code) in _EXISTS


def may_pass(status: int | None) -> bool:
    """Whether the same request may succeed later."""
    return status in _PASSING
