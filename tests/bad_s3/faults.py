# SPDX-License-Identifier: Apache-2.0
"""The faults of the tests' S3 server, by name: `modes("get:half put:503")`, `modes("any:hang")`."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal
from zlib import crc32

from ecshare.store.format import PROLOGUE_BYTES
from tests.bad_s3.server import (
    DATE,
    Fault,
    Reply,
    Request,
    Stored,
    Then,
    Verb,
    etag_of,
    honest,
    page_of,
    put,
    refused,
)

UNREACHABLE = "http://127.0.0.1:1/"
WEB_PAGE = b"<html><body>We are back soon.</body></html>\n" * 200
ERROR = b"<Error><Code>InternalError</Code><Message>Words.</Message></Error>"
_BROKEN_LENGTH = 10**12

SILENCE = Reply(0, then="hang")
RESET = Reply(0, then="reset")


def always(reply: Reply) -> Fault:
    return lambda request: reply


def after(change: Callable[[Reply], Reply]) -> Fault:
    """Carry out the request, and change the answer if it has a body."""

    def fault(request: Request) -> Reply:
        reply = honest(request)
        return change(reply) if reply.status in (200, 206) else reply

    return fault


def reading(change: Callable[[bytes], bytes], *, fits: bool = False) -> Fault:
    """Send other bytes than the stored ones. `fits`: with their own ETag, not the stored one."""

    def fault(request: Request) -> Reply | None:
        if request.stored is None:
            return None
        body = change(request.stored.body)
        return request.read(Stored(body, etag_of(body) if fits else request.stored.etag))

    return fault


def _page(body: bytes, *, has_etag: bool) -> Fault:
    headers = {"Last-Modified": DATE} | ({"ETag": etag_of(body)} if has_etag else {})
    return always(Reply(200, body, headers))


def half(body: bytes) -> bytes:
    return body[: len(body) // 2]


def empty(_: bytes) -> bytes:
    return b""


def longer(body: bytes) -> bytes:
    return body + bytes(1000)


def flipped(body: bytes) -> bytes:
    at = PROLOGUE_BYTES + (len(body) - PROLOGUE_BYTES) // 2
    return body[:at] + bytes([body[at] ^ 4]) + body[at + 1 :] if at < len(body) else body


def flipped_in_front(body: bytes) -> bytes:
    return body[:20] + bytes([body[20] ^ 4]) + body[21:]


def zeroed(body: bytes) -> bytes:
    return bytes(len(body))


def _flipped_anywhere(request: Request) -> Reply | None:
    """Flip another bit in each answer."""
    if request.stored is None:
        return None
    body = bytearray(request.stored.body)
    body[crc32(f"{request.key} {len(request.server.requests)}".encode()) % len(body)] ^= 4
    return request.read(replace(request.stored, body=bytes(body)))


def _another(request: Request) -> Reply | None:
    """Send the bytes of another stored object."""
    keys = sorted(request.server.objects)
    if request.stored is None or len(keys) < 2:
        return None
    return request.read(request.server.objects[keys[(keys.index(request.key) + 1) % len(keys)]])


def _headers(**changed: str | None) -> Fault:
    """Answer with other headers; None removes one."""

    def change(reply: Reply) -> Reply:
        headers = dict(reply.headers)
        for name, value in changed.items():
            header = name.replace("_", "-")
            headers.pop(header, None)
            if value is not None:
                headers[header] = value
        return replace(reply, headers=headers)

    return after(change)


def _new_etag(request: Request) -> Reply:
    reply = honest(request)
    return replace(
        reply, headers={**reply.headers, "ETag": f'"{len(request.server.requests):032x}"'}
    )


def _whole(request: Request) -> Reply | None:
    """Ignore ranges."""
    if request.stored is None:
        return None
    return Reply(200, request.stored.body, request.stored.headers)


def _range(change: Callable[[int, int, int], str], shift: int = 0) -> Fault:
    """Declare another range than is sent, or send another one than is declared."""

    def fault(request: Request) -> Reply:
        reply = honest(request)
        said = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", reply.headers.get("Content-Range", ""))
        if said is None or request.stored is None:
            return reply
        start, last, size = (int(number) for number in said.groups())
        body = request.stored.body[start + shift : last + 1 + shift]
        headers = {**reply.headers, "Content-Range": change(start, last, size)}
        return replace(reply, body=body, headers=headers)

    return fault


def _cut(then: Then) -> Fault:
    return after(lambda reply: replace(reply, num_sent=len(reply.body) // 2, then=then))


def cut_at(at_byte: int, then: Then) -> Fault:
    """Send only so many bytes of the body. Shorter bodies are sent whole."""

    def fault(request: Request) -> Reply | None:
        reply = honest(request)
        is_met = len(reply.body) > at_byte
        return replace(reply, num_sent=at_byte, then=then) if is_met else None

    return fault


def upload_cut_at(at_byte: int, then: Then) -> Fault:
    """Receive only so many bytes of an upload, and store nothing. Shorter ones are stored."""

    def fault(request: Request) -> Reply | None:
        is_met = request.num_bytes > at_byte
        return Reply(0, num_received=at_byte, then=then) if is_met else None

    return fault


def late(seconds: float) -> Fault:
    """Carry out the request, and answer so much later."""
    return lambda request: replace(honest(request), delay_s=seconds)


def on(key: str, fault: Fault) -> Fault:
    """Have the fault only for keys that contain `key`."""
    return lambda request: fault(request) if key in request.key else None


def in_turn(*faults: Fault) -> Fault:
    """Answer each request with the next fault, and then as S3 does."""
    left = list(faults)
    return lambda request: left.pop(0)(request) if left else None


def _raw(head: bytes, then: Then = "close") -> Fault:
    return after(lambda reply: replace(reply, raw=head, then=then))


def _moved_to_itself(request: Request) -> Reply:
    return Reply(307, headers={"Location": f"{request.server.endpoint}{request.path}"})


def now_and_then(reply: Reply) -> Fault:
    """Give this answer to every second request, by chance."""
    return lambda request: reply if request.server.dice.random() < 0.5 else None


def quota(num_bytes: int, reply: Reply) -> Fault:
    """Answer `reply` to each PUT while the bucket has so many bytes."""

    def fault(request: Request) -> Reply | None:
        used = sum(len(stored.body) for stored in (*request.server.objects.values(),))
        return reply if used >= num_bytes else None

    return fault


def storing(change: Callable[[bytes], bytes]) -> Fault:
    """Store other bytes than the sent ones."""
    return lambda request: put(request, change(request.body))


def _exists(reply: Reply) -> Fault:
    """As if another writer had just stored the same object: nothing is replaced, answer `reply`."""

    def fault(request: Request) -> Reply:
        if "if-none-match" in request.headers:
            put(request, request.body)
        return reply

    return fault


def _done_but_reset(request: Request) -> Reply:
    honest(request)
    return RESET


def _listing(**wrong: Any) -> Fault:
    """List all keys with the prefix. `wrong`: arguments of `page_of`."""
    return lambda request: page_of(request.found(), **wrong)


ANY: dict[str, Fault] = {
    "hang": always(SILENCE),
    "reset": always(RESET),
    "close": always(Reply(0, then="close")),
    "503": always(refused(503, "SlowDown")),
    "500": always(refused(500, "InternalError")),
    "403": always(refused(403, "AccessDenied")),
    "skew": always(refused(403, "RequestTimeTooSkewed")),
    "no-bucket": always(refused(404, "NoSuchBucket")),
    # These report a conflict or a redirect, whatever was requested.
    "304": always(refused(304, "")),
    "409": always(refused(409, "OperationAborted")),
    "412": always(Reply(412)),
    "moved": _moved_to_itself,
    "moved-away": always(
        replace(refused(301, "PermanentRedirect"), headers={"Location": UNREACHABLE})
    ),
    "flaky": now_and_then(refused(503, "SlowDown")),
}
"""Faults of every kind of request."""

GET: dict[str, Fault] = {
    # Other bytes than the stored ones.
    "web-page": _page(WEB_PAGE, has_etag=False),
    "web-page-with-etag": _page(WEB_PAGE, has_etag=True),
    "error-with-200": _page(ERROR, has_etag=True),
    "nothing": _page(b"", has_etag=True),
    "half": reading(half),
    "half-with-its-etag": reading(half, fits=True),
    "longer": reading(longer),
    "longer-with-its-etag": reading(longer, fits=True),
    "flipped": reading(flipped),
    "flipped-with-its-etag": reading(flipped, fits=True),
    "flipped-in-front": reading(flipped_in_front),
    "flipped-anywhere": _flipped_anywhere,
    "zeroed": reading(zeroed),
    "another": _another,
    # Odd headers.
    "new-etags": _new_etag,
    "no-etag": _headers(ETag=None),
    "bad-date": _headers(Last_Modified="yesterday"),
    "no-date": _headers(Last_Modified=None),
    "no-range": _whole,
    "wrong-range": _range(lambda start, last, size: f"bytes {start}-{last}/{size + 7}"),
    "shifted-range": _range(lambda start, last, size: f"bytes {start}-{last}/{size}", shift=1),
    "says-another-range": _range(lambda start, last, size: f"bytes {start + 1}-{last + 1}/{size}"),
    # Odd bodies.
    "huge-length": after(lambda reply: replace(reply, length=_BROKEN_LENGTH, then="hang")),
    "short-length": after(lambda reply: replace(reply, length=len(reply.body) // 2, then="close")),
    "long-length": after(lambda reply: replace(reply, length=len(reply.body) + 9, then="close")),
    "long-and-hang": after(lambda reply: replace(reply, length=len(reply.body) + 9, then="hang")),
    "chunks": after(lambda reply: replace(reply, framing="chunks")),
    "no-length": after(lambda reply: replace(reply, framing="end", then="close")),
    "old-http": _raw(b"HTTP/1.0 200 OK\r\nLast-Modified: " + DATE.encode() + b"\r\n\r\n"),
    "garbage": _raw(bytes(range(256)) * 4),
    "endless-head": _raw(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000, "hang"),
    "cut": _cut("close"),
    "cut-by-reset": _cut("reset"),
    "stall": _cut("hang"),
    "drip": after(lambda reply: replace(reply, drips=True)),
    "missing": always(refused(404, "NoSuchKey")),
}
DAMAGING = (
    "web-page", "web-page-with-etag", "error-with-200", "nothing", "half", "half-with-its-etag",
    "longer", "longer-with-its-etag", "flipped", "flipped-with-its-etag", "flipped-in-front",
    "flipped-anywhere", "zeroed", "another",
)  # fmt: skip
"""The GET faults with well-formed answers and other bytes than the stored ones."""

PUT: dict[str, Fault] = {
    "exists": _exists(refused(412, "PreconditionFailed")),
    "exists-by-409": _exists(refused(409, "Conflict")),
    "conflict": always(refused(409, "ConditionalRequestConflict")),
    "conflict-now-and-then": now_and_then(refused(409, "ConditionalRequestConflict")),
    "bad-digest": always(refused(400, "BadDigest")),
    "not-implemented": always(refused(501, "NotImplemented")),
    "full": always(refused(507, "InsufficientStorage")),
    "error-with-200": always(Reply(200, ERROR)),
    "lost": lambda request: Reply(200, headers={"ETag": etag_of(request.body)}),
    "torn": storing(half),
    "done-but-reset": _done_but_reset,
}
LIES = ("put:lost", "put:torn")
"""The server reports a successful upload without storing all of it: only a later read shows it."""
HEAD: dict[str, Fault] = {
    "everything": always(Reply(200, bytes(100), {"ETag": etag_of(b""), "Last-Modified": DATE})),
    "missing": always(refused(404, "NoSuchKey")),
    "no-etag": _headers(ETag=None),
}
LIST: dict[str, Fault] = {
    "junk": always(Reply(200, b"not xml <")),
    "web-page": always(Reply(200, WEB_PAGE)),
    "loop": _listing(is_cut=True, next_page="again"),
    "empty-loop": lambda request: page_of({}, next_page=str(len(request.server.requests))),
    "no-token": _listing(is_cut=True),
    "twice": _listing(repeat=2),
    "odd-keys": lambda request: page_of(
        request.found() | dict.fromkeys(_odd_keys(request.query.get("prefix", "")), Stored.of(b""))
    ),
    "bad-date": _listing(date="yesterday"),
    "bad-size": _listing(size=-5),
}
DELETE: dict[str, Fault] = {
    "error-with-200": lambda request: Reply(
        200, f"<DeleteResult>{ERROR.decode()}</DeleteResult>".encode()
    ),
    "of-another": always(
        Reply(200, b"<DeleteResult><Error><Key>no</Key><Code>No</Code></Error></DeleteResult>")
    ),
}


def _odd_keys(prefix: str) -> tuple[str, ...]:
    odd = ("", "/", "/x", "../x", "x/../../y", "./x", "a\tb", "\u00e9", "a" * 3000, "%2F")
    return ("../x", "/absolute", *(prefix + each for each in odd))


FAULTS: dict[Verb | Literal["any"], dict[str, Fault]] = {
    "any": ANY,
    "get": ANY | GET,
    "put": ANY | PUT,
    "head": ANY | HEAD,
    "list": ANY | LIST,
    "delete": ANY | DELETE,
}


def modes(text: str) -> dict[str, Fault]:
    """Read "get:half delete:403"."""
    named = dict(each.split(":") for each in text.split())
    return {verb: FAULTS[verb][named[verb]] for verb in FAULTS if verb in named}
