# SPDX-License-Identifier: Apache-2.0
"""Notes of use as objects, also damaged and forged ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecshare.store.errors import ObjectCorrupt
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Key, Kind, new_uses_key, object_key, use_id, use_id_of
from ecshare.upkeep.uses import MOST_USES, Uses, pack, unpack

NAMESPACE = "00112233445566778899aabbccddeeff"
KEY = new_uses_key(Kind.KV)
WORD = st.integers(0, (1 << 32) - 1)


@given(st.lists(st.tuples(st.integers(0, (1 << 64) - 1), WORD, WORD), max_size=20))
def test_note_returns_the_uses_it_was_made_of(rows: list[tuple[int, int, int]]) -> None:
    found = unpack(memoryview(pack(Uses.of(rows), KEY, None)), KEY, None)
    columns = (found.ids.tolist(), found.ages.tolist(), found.positions.tolist())
    assert list(zip(*columns, strict=True)) == rows


def test_note_of_another_key_or_without_our_mac_is_refused() -> None:
    body = pack(Uses.of([(1, 2, 3)]), KEY, Integrity(b"a" * 32))
    assert len(unpack(memoryview(body), KEY, None)) == 1
    assert len(unpack(memoryview(body), KEY, Integrity(b"a" * 32))) == 1
    with pytest.raises(ObjectCorrupt, match="MAC"):
        unpack(memoryview(body), KEY, Integrity(b"b" * 32))
    with pytest.raises(ObjectCorrupt, match="stored as"):
        unpack(memoryview(body), new_uses_key(Kind.KV), None)
    body[-1] ^= 1
    with pytest.raises(ObjectCorrupt, match="checksum"):
        unpack(memoryview(body), KEY, None)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("U8", (16,)), ("U32", (4,)), ("U32", (2, 2)), ("U64", (2, 4))]
)
def test_object_of_another_shape_is_no_note(dtype: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec(dtype, shape)
    body = bytearray(PROLOGUE_BYTES + spec.num_bytes)
    seal(memoryview(body), spec, KEY)
    with pytest.raises(ObjectCorrupt, match="no uses"):
        unpack(memoryview(body), KEY, None)


def test_many_uses_are_cut_into_parts_that_fit() -> None:
    num = MOST_USES * 2 + 3
    uses = Uses(np.arange(num, dtype=np.uint64), np.zeros(num, np.uint32), np.zeros(num, np.uint32))
    assert [len(part) for part in uses.parts()] == [MOST_USES, MOST_USES, 3]


def test_shards_of_a_name_have_one_id_and_namespaces_differ() -> None:
    shards = [object_key(Kind.KV, NAMESPACE, b"chunk", f"t{n}of2") for n in range(2)]
    other = object_key(Kind.KV, NAMESPACE[::-1], b"chunk", "t0of2")
    assert use_id_of(shards[0]) == use_id_of(shards[1]) != use_id_of(other)
    digest = shards[0].rpartition("/")[2].partition(".")[0]
    assert use_id_of(shards[0]) == use_id(NAMESPACE, digest) < 1 << 64
    assert isinstance(KEY, Key)
