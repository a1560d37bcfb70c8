# SPDX-License-Identifier: Apache-2.0
import json
import struct
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ecshare import __version__
from ecshare.store.errors import ObjectCorrupt
from ecshare.store.format import ITEM_BYTES, PROLOGUE_BYTES, TensorSpec, seal, unseal
from ecshare.store.keys import Kind, object_key

KEY = object_key(Kind.EC, "0" * 32, "an object")
ATTRIBUTES = {"num_embeds": 3, "metadata": {"image_grid_thw": [1, 32, 32]}, "name": "ä"}
FACTS = TensorSpec("BF16", (3, 5), ATTRIBUTES)
TENSOR = torch.arange(15, dtype=torch.bfloat16).view(3, 5)


def sealed(facts: TensorSpec = FACTS, payload: bytes | None = None) -> bytearray:
    if payload is None:
        payload = bytes(TENSOR.view(torch.uint8).numpy().tobytes())
    slab = bytearray(PROLOGUE_BYTES) + payload
    seal(memoryview(slab), facts, KEY)
    return slab


def header_of(slab: bytearray) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(slab[8:PROLOGUE_BYTES])
    return header


def with_header(slab: bytearray, header: dict[str, Any] | bytes) -> bytearray:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return bytearray(slab[:8] + text.ljust(PROLOGUE_BYTES - 8) + slab[PROLOGUE_BYTES:])


def test_unseal_returns_the_sealed_payload_without_a_copy() -> None:
    slab = sealed()
    found = unseal(memoryview(slab), KEY)
    assert found.spec == FACTS
    assert found.payload == slab[PROLOGUE_BYTES:]
    assert found.payload.readonly
    slab[PROLOGUE_BYTES] ^= 1
    assert found.payload[0] == slab[PROLOGUE_BYTES]


def test_safetensors_can_read_an_object() -> None:
    slab = bytes(sealed())
    assert torch.equal(safetensors.torch.load(slab)["tensor"], TENSOR)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype_has_safetensors_name_and_size(dtype: str) -> None:
    slab = bytes(sealed(TensorSpec(dtype, (2, 3)), bytes(6 * ITEM_BYTES[dtype])))
    assert safetensors.torch.load(slab)["tensor"].shape == (2, 3)
    assert unseal(memoryview(slab), KEY).spec.num_bytes == 6 * ITEM_BYTES[dtype]


@pytest.mark.parametrize("shape", [(), (0,), (0, 7), (1,) * 8])
def test_scalars_and_empty_tensors_are_sealed(shape: tuple[int, ...]) -> None:
    facts = TensorSpec("F32", shape)
    slab = sealed(facts, bytes(facts.num_bytes))
    assert unseal(memoryview(slab), KEY).spec == facts
    assert safetensors.torch.load(bytes(slab))["tensor"].shape == shape


def test_prologue_is_as_documented() -> None:
    slab = sealed()
    assert struct.unpack("<Q", slab[:8]) == (PROLOGUE_BYTES - 8,)
    header = header_of(slab)
    assert header["tensor"] == {"dtype": "BF16", "shape": [3, 5], "data_offsets": [0, 30]}
    metadata = header["__metadata__"]
    assert metadata["ecshare.format"] == "2"
    assert metadata["ecshare.producer"] == __version__
    assert json.loads(metadata["ecshare.attributes"]) == ATTRIBUTES
    assert metadata["ecshare.key"] == KEY
    assert "ecshare.mac" not in metadata
    believed = [2, KEY, "BF16", [3, 5], metadata["ecshare.attributes"], __version__]
    digest = xxhash.xxh3_128(json.dumps(believed, separators=(",", ":")).encode())
    digest.update(slab[PROLOGUE_BYTES:])
    assert metadata["ecshare.checksum"] == f"xxh3_128:{digest.hexdigest()}"


def test_seal_accepts_typed_views() -> None:
    slab = memoryview(bytearray(PROLOGUE_BYTES + 8))
    floats: Any = slab.cast("f")
    seal(floats, TensorSpec("F32", (2,)), KEY)
    assert unseal(floats, KEY).spec.shape == (2,)


@pytest.mark.parametrize(
    "facts",
    [
        TensorSpec("BF16", (3, 4)),
        TensorSpec("BF17", (3, 5)),
        TensorSpec("BF16", (-3, -5)),
        TensorSpec("BF16", (1,) * 7 + (3, 5)),
        TensorSpec("BF16", (3, 5), {"a": "x" * 4096}),
        TensorSpec("BF16", (3, 5), {"a": float("nan")}),
    ],
)
def test_seal_refuses_a_spec_that_does_not_fit(facts: TensorSpec) -> None:
    slab = bytearray(PROLOGUE_BYTES + 30)
    with pytest.raises(ValueError, match="seal|JSON"):
        seal(memoryview(slab), facts, KEY)
    assert slab == bytes(PROLOGUE_BYTES + 30)


@given(st.integers(0, (PROLOGUE_BYTES + 30) * 8 - 1))
def test_flipped_bit_is_detected_or_harmless(bit: int) -> None:
    slab = sealed()
    slab[bit // 8] ^= 1 << bit % 8
    try:
        found = unseal(memoryview(slab), KEY)
    except ObjectCorrupt:
        return
    assert (found.spec, bytes(found.payload)) == (FACTS, bytes(sealed()[PROLOGUE_BYTES:]))


def test_every_flipped_bit_of_the_header_is_detected() -> None:
    """Every bit is tried, up to the padding."""
    good = sealed()
    text = bytes(good[8:PROLOGUE_BYTES]).rstrip()
    survivors = 0
    for bit in range((8 + len(text)) * 8):
        slab = bytearray(good)
        slab[bit // 8] ^= 1 << bit % 8
        try:
            found = unseal(memoryview(slab), KEY)
        except ObjectCorrupt:
            continue
        survivors += 1
        assert (found.spec, bytes(found.payload)) == (FACTS, bytes(good[PROLOGUE_BYTES:]))
    assert survivors == 0


@given(st.binary(max_size=PROLOGUE_BYTES + 100))
def test_random_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(ObjectCorrupt):
        unseal(memoryview(body), KEY)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
)
FIELDS = st.sampled_from(
    [
        ("tensor",),
        ("tensor", "dtype"),
        ("tensor", "shape"),
        ("tensor", "data_offsets"),
        ("__metadata__",),
        ("__metadata__", "ecshare.format"),
        ("__metadata__", "ecshare.key"),
        ("__metadata__", "ecshare.checksum"),
        ("__metadata__", "ecshare.attributes"),
        ("__metadata__", "ecshare.producer"),
        ("another",),
    ]
)


@given(FIELDS, JSON, st.booleans())
def test_header_with_a_changed_value_is_refused(
    field: tuple[str, ...], value: Any, verify: bool
) -> None:
    """Without verification, too, only ObjectCorrupt is raised and sizes are right."""
    slab = sealed()
    header = header_of(slab)
    inner = header
    for name in field[:-1]:
        inner = inner[name]
    same = inner.get(field[-1]) == value
    inner[field[-1]] = value
    try:
        found = unseal(memoryview(with_header(slab, header)), KEY, verify=verify)
    except ObjectCorrupt:
        return
    assert found.spec.num_bytes == len(found.payload) == 30
    assert same or not verify


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 4000,
        b'{"a":' * 800,
        b"{}",
        b"null",
        b"\xff\xfe",
        b'{"tensor":{"dtype":"U8","shape":[9999999999999999999999],"data_offsets":[0,1]}}',
    ],
)
def test_hostile_header_is_refused(header: bytes) -> None:
    with pytest.raises(ObjectCorrupt):
        unseal(memoryview(with_header(sealed(), header)), KEY)


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ([1 << 40, 1 << 40], [0, 30]),
        ([0, 1 << 62], [0, 0]),
        ([-3, -5], [0, 30]),
        ([3, 5], [0, 1 << 60]),
        ([3, 5], [2, 32]),
        ([3, 5], [-30, 0]),
        ([1] * 9 + [15], [0, 30]),
    ],
)
def test_absurd_sizes_are_refused_without_verification(
    shape: list[int], offsets: list[int]
) -> None:
    slab = sealed()
    header = header_of(slab)
    header["tensor"] |= {"shape": shape, "data_offsets": offsets}
    with pytest.raises(ObjectCorrupt):
        unseal(memoryview(with_header(slab, header)), KEY, verify=False)


@pytest.mark.parametrize(
    "attributes", ["", "[]", "null", '{"a":' + "[" * 3000, '{"a":', "{1:2}", "\ud800"]
)
def test_malformed_attributes_are_refused(attributes: str) -> None:
    slab = sealed()
    header = header_of(slab)
    header["__metadata__"]["ecshare.attributes"] = attributes
    with pytest.raises(ObjectCorrupt):
        unseal(memoryview(with_header(slab, header)), KEY, verify=False)


@pytest.mark.parametrize("cut", [0, 1, 8, 100, PROLOGUE_BYTES, PROLOGUE_BYTES + 29])
def test_truncated_object_is_refused(cut: int) -> None:
    with pytest.raises(ObjectCorrupt):
        unseal(memoryview(sealed())[:cut], KEY, verify=False)


def test_valid_object_of_another_key_is_refused() -> None:
    """Also without verification: it may have been copied from another namespace."""
    for verify in (True, False):
        with pytest.raises(ObjectCorrupt, match="stored as"):
            unseal(memoryview(sealed()), KEY + ".r0", verify=verify)


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(ObjectCorrupt, match="payload"):
        unseal(memoryview(bytes(sealed()) + b"x"), KEY, verify=False)


def test_without_verification_only_the_checksum_is_skipped() -> None:
    slab = sealed()
    slab[-1] ^= 1
    with pytest.raises(ObjectCorrupt, match="checksum"):
        unseal(memoryview(slab), KEY)
    assert unseal(memoryview(slab), KEY, verify=False).spec == FACTS


def test_another_format_version_is_refused() -> None:
    slab = sealed()
    header = header_of(slab)
    header["__metadata__"]["ecshare.format"] = "1"
    with pytest.raises(ObjectCorrupt, match="format '1'"):
        unseal(memoryview(with_header(slab, header)), KEY)


def test_unknown_metadata_is_ignored() -> None:
    slab = sealed()
    header = header_of(slab)
    header["__metadata__"]["ecshare.later"] = "abc"
    assert unseal(memoryview(with_header(slab, header)), KEY).spec == FACTS
