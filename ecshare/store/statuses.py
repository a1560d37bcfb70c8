# SPDX-License-Identifier: Apache-2.0
"""The meaning of HTTP statuses of refusals, for every client library and every cloud.

| status                               | request           | meaning                              |
|--------------------------------------|-------------------|--------------------------------------|
| 412 PreconditionFailed (S3, Google), | create-only PUT   | the object exists                    |
| 409 BlobAlreadyExists (Azure)        |                   |                                      |
| any other 304, 409 or 412            | any               | `Conflict`: nothing was done         |
| 404                                  | GET, HEAD, DELETE | there is no such object              |
| 404                                  | PUT, listing      | there is no place for objects        |
| 408, 425, 429, 5xx                   | any               | the store is busy: this may pass     |

401 and 403 are denials, except if a quota is used up: that may pass. Every other status says that
the request, or the server, is wrong.

Client libraries map a status to one exception class for all requests: a 409 in answer to a GET
becomes "already exists". So this module decides by the status itself. Pure.
"""

from ecshare.store.errors import StoreBusy

CONFLICTS = frozenset({304, 409, 412})
_PASSING = frozenset({408, 425, 429, *range(500, 600)})
_EXISTS = frozenset({(412, "PreconditionFailed"), (409, "BlobAlreadyExists")})


class Conflict(StoreBusy):
    """The store did nothing, because of a conflict. A second try may succeed."""

    def __init__(self, words: str, *, says_exists: bool = False) -> None:
        """Hold the message. `says_exists`: as answer to a create-only PUT, it proves that the
        object exists."""
        super().__init__(words)
        self.says_exists = says_exists


def says_exists(status: int | None, code: str) -> bool:
    """Return whether this answer to a create-only PUT proves that the object exists.

    `code`: the error code in the answer. Some servers answer 409 if the object exists, but 409 may
    also mean a conflict with another request, so it proves nothing.
    """
    return (status, code) in _EXISTS


def is_full(code: str) -> bool:
    """Return whether this code of an error, with any status, says that a quota is used up."""
    return "quota" in code.lower()


def may_pass(status: int | None) -> bool:
    """Return whether the same request may succeed later."""
    return status in _PASSING
