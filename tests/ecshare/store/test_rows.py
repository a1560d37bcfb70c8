# SPDX-License-Identifier: Apache-2.0
"""Rows of an object, read without the others."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecshare.store.errors import ObjectCorrupt
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal, unseal, unseal_rows
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Kind, object_key
from ecshare.store.objects import Span
from ecshare.store.rows import MAX_ROWS, Rows

KEY = object_key(Kind.KV, "0" * 32, b"a chunk", "t0of2")
FACTS = TensorSpec("U8", (4, 5), {"num_tokens": 5}, by_row=True)
PAYLOAD = bytes(range(20))
OURS = Integrity(b"0123456789abcdef")
THEIRS = Integrity(b"fedcba9876543210")


def sealed(facts: TensorSpec = FACTS, integrity: Integrity | None = None) -> bytes:
    payload = PAYLOAD if facts.num_bytes == 20 else bytes(facts.num_bytes)
    slab = bytearray(PROLOGUE_BYTES) + payload
    seal(memoryview(slab), facts, KEY, integrity)
    return bytes(slab)


def rows(first: int, end: int, count: int = 4, row_bytes: int = 5) -> Rows:
    return Rows(first, end, count, row_bytes)


def read(body: bytes, wanted: Rows) -> memoryview:
    """What a store gives for the spans of these rows."""
    spans = wanted.spans(PROLOGUE_BYTES)
    return memoryview(b"".join(body[span.start : span.stop] for span in spans))


def with_list(body: bytes, text: str) -> bytes:
    header: dict[str, Any] = json.loads(body[8:PROLOGUE_BYTES])
    header["__metadata__"]["ecshare.rows"] = text
    return body[:8] + json.dumps(header).encode().ljust(PROLOGUE_BYTES - 8) + body[PROLOGUE_BYTES:]


def list_of(body: bytes) -> str:
    return str(json.loads(body[8:PROLOGUE_BYTES])["__metadata__"]["ecshare.rows"])


@pytest.mark.parametrize("integrity", [None, OURS])
@pytest.mark.parametrize(("first", "end"), [(a, b) for a in range(4) for b in range(a + 1, 5)])
def test_any_range_of_rows_comes_out(first: int, end: int, integrity: Integrity | None) -> None:
    part = read(sealed(integrity=integrity), rows(first, end))
    found = unseal_rows(part, KEY, rows(first, end), integrity=integrity)
    assert found.payload == PAYLOAD[5 * first : 5 * end]
    assert found.payload.readonly
    assert found.facts == TensorSpec("U8", (end - first, 5), {"num_tokens": 5}, by_row=True)


def test_rows_that_follow_the_prologue_are_one_span_with_it() -> None:
    assert rows(0, 2).spans(4096) == (Span(0, 4106),)
    assert rows(1, 2).spans(4096) == (Span(0, 4096), Span(4101, 4106))


@pytest.mark.parametrize("integrity", [None, OURS])
def test_the_whole_object_is_read_as_ever(integrity: Integrity | None) -> None:
    assert unseal(memoryview(sealed(integrity=integrity)), KEY, integrity=integrity).facts == FACTS


@pytest.mark.parametrize("integrity", [None, OURS])
def test_every_bit_that_is_read_is_checked(integrity: Integrity | None) -> None:
    """But the checksum of the whole object, which who reads some rows cannot check."""
    wanted = rows(1, 3)
    good = bytes(read(sealed(integrity=integrity), wanted))
    text = good[8:PROLOGUE_BYTES].rstrip()
    at = 8 + text.index(b'"xxh3_128:')
    unread = range(at, at + len('"xxh3_128:') + 33)
    places = [*range(8 + len(text)), *range(PROLOGUE_BYTES, len(good))]
    for place in places:
        for bit in range(8):
            part = bytearray(good)
            part[place] ^= 1 << bit
            try:
                found = unseal_rows(memoryview(part), KEY, wanted, integrity=integrity)
            except ObjectCorrupt:
                continue
            assert place in unread
            assert (found.facts.shape, bytes(found.payload)) == ((2, 5), PAYLOAD[5:15])


def test_rows_of_another_place_are_refused() -> None:
    """Sound ones: the list binds each to its place."""
    body = sealed()
    with pytest.raises(ObjectCorrupt, match="checksum"):
        unseal_rows(read(body, rows(0, 2)), KEY, rows(1, 3))
    prologue = body[:PROLOGUE_BYTES]
    with pytest.raises(ObjectCorrupt, match="checksum"):
        unseal_rows(memoryview(prologue + PAYLOAD[5:10] + PAYLOAD[:5]), KEY, rows(0, 2))


def test_rows_of_another_key_are_refused() -> None:
    for verify in (True, False):
        with pytest.raises(ObjectCorrupt, match="stored as"):
            unseal_rows(read(sealed(), rows(1, 2)), KEY + "x", rows(1, 2), verify=verify)


@pytest.mark.parametrize(
    "wanted", [rows(1, 2, 3), rows(1, 2, 5), rows(1, 2, 4, 6), rows(1, 2, 4, 4), rows(1, 3, 2, 10)]
)
def test_an_object_of_other_rows_is_refused_unverified_too(wanted: Rows) -> None:
    with pytest.raises(ObjectCorrupt):
        unseal_rows(read(sealed() + bytes(99), wanted), KEY, wanted, verify=False)


def test_rows_that_did_not_all_come_are_refused() -> None:
    for extra in (-1, 1):
        part = bytes(read(sealed(), rows(1, 3))) + b"x"
        with pytest.raises(ObjectCorrupt, match="rows asked for"):
            unseal_rows(memoryview(part)[: len(part) - 1 + extra], KEY, rows(1, 3), verify=False)


def test_an_object_without_checksums_of_rows_has_none_to_read() -> None:
    body = sealed(TensorSpec("U8", (4, 5)))
    with pytest.raises(ObjectCorrupt, match="no rows"):
        unseal_rows(read(body, rows(1, 2)), KEY, rows(1, 2), verify=False)


@pytest.mark.parametrize(
    ("writer", "reader"), [(None, OURS), (OURS, None), (THEIRS, OURS), (OURS, THEIRS)]
)
def test_rows_are_taken_with_the_right_key_alone(
    writer: Integrity | None, reader: Integrity | None
) -> None:
    with pytest.raises(ObjectCorrupt):
        unseal_rows(read(sealed(integrity=writer), rows(1, 2)), KEY, rows(1, 2), integrity=reader)


@pytest.mark.parametrize("writer", [None, THEIRS])
def test_the_whole_object_is_authenticated_by_its_rows(writer: Integrity | None) -> None:
    assert b"ecshare.mac" not in sealed(integrity=OURS)
    with pytest.raises(ObjectCorrupt, match=r"integrity_key|checksum of its header"):
        unseal(memoryview(sealed(integrity=writer)), KEY, integrity=OURS)


def test_who_has_no_key_cannot_make_rows() -> None:
    """Not of the parts of sound objects either."""
    mine = sealed(TensorSpec("U8", (4, 5), {"num_tokens": 4}, by_row=True), OURS)
    forged = with_list(mine, list_of(sealed(integrity=OURS)))
    with pytest.raises(ObjectCorrupt, match="checksum"):
        unseal_rows(read(forged, rows(1, 2)), KEY, rows(1, 2), integrity=OURS)


@pytest.mark.parametrize(
    "text", ["xxh3_128:", "xxh3_128:AAAA", "xxh3_128:" + "A" * 108, "xxh3_128:ä", "blake3:", "x"]
)
def test_a_hostile_list_is_refused(text: str) -> None:
    with pytest.raises(ObjectCorrupt):
        unseal_rows(read(with_list(sealed(), text), rows(1, 2)), KEY, rows(1, 2))


@given(st.text(max_size=3000))
def test_any_list_is_refused(text: str) -> None:
    with pytest.raises(ObjectCorrupt):
        unseal_rows(read(with_list(sealed(), text), rows(1, 2)), KEY, rows(1, 2))


@pytest.mark.parametrize("shape", [(MAX_ROWS + 1, 2), (0, 2), ()])
def test_an_object_has_few_rows_or_none_to_read(shape: tuple[int, ...]) -> None:
    facts = TensorSpec("U8", shape, by_row=True)
    with pytest.raises(ValueError, match="rows"):
        sealed(facts)


def test_the_checksums_of_as_many_rows_as_there_may_be_fit_into_the_prologue() -> None:
    """With a MAC, and all that is said of KV."""
    attributes = {
        "chunk": "f" * 64,
        "num_tokens": 1 << 20,
        "block_tokens": 1 << 20,
        "num_layers": 999,
    }
    facts = TensorSpec("F8_E4M3", (MAX_ROWS, 3, 2, 2), attributes, by_row=True)
    wanted = Rows(MAX_ROWS - 1, MAX_ROWS, MAX_ROWS, 12)
    slab = bytearray(PROLOGUE_BYTES + facts.num_bytes)
    key = KEY.removesuffix("t0of2") + "t127of128-" + "x" * 22
    seal(memoryview(slab), facts, key, OURS)
    assert unseal_rows(read(bytes(slab), wanted), key, wanted, integrity=OURS).facts.shape[0] == 1
