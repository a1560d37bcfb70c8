# SPDX-License-Identifier: Apache-2.0
"""Checksums of the single rows of an object, so that some can be read without the others; pure.

A row is one index of the first axis: one head of a chunk of KV. The list holds a digest of each
row, and as its last one a digest of all that a reader believes of the object with those before it:
who reads one row has then verified what the row is.
"""

import base64
import hmac
from collections.abc import Sequence
from typing import Final

import xxhash
from msgspec import Struct

from ecshare.store.errors import ObjectCorrupt
from ecshare.store.integrity import Integrity
from ecshare.store.objects import Span

MAX_ROWS: Final = 128
"""Whose digests fit into the prologue."""

_DIGEST_BYTES: Final = 16
_PLAIN: Final = "xxh3_128:"
_KEYED: Final = "blake3:"


class Rows(Struct, frozen=True):
    """The rows `first` to before `end`, at least one, of `count`, each of `row_bytes`."""

    first: int
    end: int
    count: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """What they hold."""
        return (self.end - self.first) * self.row_bytes

    def spans(self, prologue_bytes: int) -> tuple[Span, ...]:
        """Return what of the object must be read: its prologue, and they."""
        start, stop = (prologue_bytes + row * self.row_bytes for row in (self.first, self.end))
        if not self.first:
            return (Span(0, stop),)
        return Span(0, prologue_bytes), Span(start, stop)


def rows_of(payload: memoryview, count: int) -> list[memoryview]:
    """Cut `payload` into its `count` rows."""
    row_bytes = len(payload) // count
    return [payload[row * row_bytes : (row + 1) * row_bytes] for row in range(count)]


def row_checksums(head: bytes, rows: Sequence[memoryview], integrity: Integrity | None) -> str:
    """Return the list, as text. `head`: what a reader believes of the object; see format.py."""
    digests = [_digest(row, integrity) for row in rows]
    digests.append(_head_digest(head, digests, integrity))
    return _prefix(integrity) + base64.b64encode(b"".join(digests)).decode("ascii")


def check_rows(
    text: str, head: bytes, rows: Rows, payload: memoryview, integrity: Integrity | None
) -> None:
    """ObjectCorrupt: by the list `text`, `payload` is not these rows of the object of `head`.

    With `integrity`, the list must be made with its key; without, with none.
    """
    if not text.startswith(_prefix(integrity)):
        raise ObjectCorrupt("corrupt object: its rows are not made with our integrity_key")
    digests = _parsed(text.removeprefix(_prefix(integrity)), rows.count)
    wanted = [_head_digest(head, digests[:-1], integrity)]
    wanted += [_digest(row, integrity) for row in rows_of(payload, rows.end - rows.first)]
    found = [digests[-1], *digests[rows.first : rows.end]]
    if not hmac.compare_digest(b"".join(found), b"".join(wanted)):
        raise ObjectCorrupt("corrupt object: the checksum of its header or of a row differs")


def _parsed(encoded: str, count: int) -> list[bytes]:
    try:
        raw = base64.b64decode(encoded, validate=True)
    except ValueError as exc:
        raise ObjectCorrupt(f"corrupt object: odd checksums of rows, {exc}") from exc
    if base64.b64encode(raw).decode("ascii") != encoded:  # its last letter has bits to spare
        raise ObjectCorrupt("corrupt object: odd checksums of rows")
    if len(raw) != (count + 1) * _DIGEST_BYTES:
        raise ObjectCorrupt(f"corrupt object: {len(raw)} bytes are not {count} rows' checksums")
    return [raw[at : at + _DIGEST_BYTES] for at in range(0, len(raw), _DIGEST_BYTES)]


def _prefix(integrity: Integrity | None) -> str:
    return _PLAIN if integrity is None else _KEYED


def _digest(row: memoryview, integrity: Integrity | None) -> bytes:
    if integrity is None:
        return xxhash.xxh3_128_digest(row)
    return integrity.of_row(row)[:_DIGEST_BYTES]


def _head_digest(head: bytes, digests: Sequence[bytes], integrity: Integrity | None) -> bytes:
    text = b"".join([head, *digests])
    if integrity is None:
        return xxhash.xxh3_128_digest(text)
    return integrity.of_rows(text)[:_DIGEST_BYTES]
