# SPDX-License-Identifier: Apache-2.0
"""The checksum that is computed while an object arrives."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecshare.store.errors import ObjectCorrupt
from ecshare.store.format import (
    PROLOGUE_BYTES,
    StreamingChecksum,
    TensorSpec,
    seal,
    unseal,
)
from ecshare.store.keys import Kind, object_key

KEY = object_key(Kind.EC, "0" * 32, "an object")
FACTS = TensorSpec("U8", (3000,), {"num_embeds": 3})
SIZE = PROLOGUE_BYTES + FACTS.num_bytes


def sealed() -> bytearray:
    slab = bytearray(PROLOGUE_BYTES) + bytes(n % 251 for n in range(FACTS.num_bytes))
    seal(memoryview(slab), FACTS, KEY)
    return slab


def added_up(body: bytes | bytearray, cuts: Sequence[int]) -> StreamingChecksum:
    """Feed pieces that begin at 0 and at each of `cuts`, in the given order."""
    starts = [0, *cuts]
    ends = {
        start: end for start, end in zip(sorted(starts), [*sorted(cuts), len(body)], strict=True)
    }
    running = StreamingChecksum()
    for start in starts:
        running.take(start, memoryview(body)[start : ends[start]])
    return running


@given(st.lists(st.integers(PROLOGUE_BYTES, SIZE - 1), unique=True, max_size=6))
def test_streamed_digest_equals_that_of_the_whole_object(cuts: list[int]) -> None:
    streamed = added_up(sealed(), sorted(cuts))
    assert streamed.digest(SIZE)
    assert unseal(memoryview(sealed()), KEY, streamed=streamed).spec == FACTS


@given(st.integers(0, SIZE - 1), st.integers(1, 255))
def test_changed_byte_is_detected_despite_a_streamed_digest(at: int, change: int) -> None:
    slab = sealed()
    slab[at] ^= change
    streamed = added_up(slab, [PROLOGUE_BYTES + 1000])
    try:
        facts = unseal(memoryview(slab), KEY, streamed=streamed).spec
    except ObjectCorrupt:
        return
    assert facts == FACTS
    assert at < PROLOGUE_BYTES, "a byte of the payload was changed"


def test_reader_compares_the_streamed_digest() -> None:
    other = sealed()
    other[-1] ^= 1
    with pytest.raises(ObjectCorrupt, match="checksum"):
        unseal(memoryview(sealed()), KEY, streamed=added_up(other, []))


@pytest.mark.parametrize(
    "cuts", [[6000, 5000], [100], [PROLOGUE_BYTES - 1]], ids=["out of order", "short", "shorter"]
)
def test_digest_is_unknown_for_unordered_or_short_pieces(cuts: list[int]) -> None:
    assert added_up(sealed(), cuts).digest(SIZE) == ""


def test_digest_is_unknown_for_missing_or_repeated_bytes() -> None:
    slab = memoryview(sealed())
    running = StreamingChecksum()
    assert running.digest(0) == ""
    running.take(0, slab[:5000])
    assert running.digest(SIZE) == ""
    running.take(0, slab[:5000])
    running.take(5000, slab[5000:])
    assert running.digest(SIZE) == ""


def test_digest_is_unknown_for_bytes_that_are_no_object() -> None:
    running = StreamingChecksum()
    running.take(0, memoryview(b"x" * SIZE))
    assert running.digest(SIZE) == ""


def test_digest_of_overwritten_bytes_is_not_used() -> None:
    """A store may send the beginning twice: the host cache then holds the later bytes."""
    streamed, there = added_up(sealed(), []), sealed()
    other = TensorSpec("U8", (3000,), {"num_embeds": 4})
    seal(memoryview(there), other, KEY)
    assert unseal(memoryview(there), KEY, streamed=streamed).spec == other
