# SPDX-License-Identifier: Apache-2.0
"""Damaged and forged objects: reading gives the sealed content, or raises ObjectCorrupt."""

import contextlib
import json
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ecshare.store.errors import ObjectCorrupt
from ecshare.store.format import (
    PROLOGUE_BYTES,
    TENSOR_NAME,
    Sealed,
    StreamingChecksum,
    TensorSpec,
    seal,
    unseal,
)
from ecshare.store.integrity import Integrity
from ecshare.store.keys import FORMAT_VERSION, Kind, object_key
from tests.fuzz.running import dice, fuzzed
from tests.fuzz.values import ODD_TEXT, mutated, written

pytestmark = pytest.mark.fuzz

Draw = Callable[[st.SearchStrategy[Any]], Any]

NAMESPACE = "00112233445566778899aabbccddeeff"
KEY = object_key(Kind.KV, NAMESPACE, b"name", "t0of1")
OTHER_KEY = object_key(Kind.KV, NAMESPACE, b"other", "t0of1")
OURS, THEIRS = Integrity(b"0123456789abcdef0123"), Integrity(b"another key of 16+ bytes")
ATTRIBUTES = {"num_embeds": 4, "metadata": {"image_grid_thw": [1, 2, 3]}}
FORMS: list[tuple[str, tuple[int, ...]]] = [
    ("BF16", (4, 16)),
    ("F32", (4, 3, 5)),
    ("U8", (128, 2)),
    ("F32", (0, 8)),
    ("F64", ()),
    ("BF16", (1, 7)),
]
HEADER_BYTES = PROLOGUE_BYTES - 8


class Sound(NamedTuple):
    """An object as it was sealed."""

    raw: bytes
    facts: TensorSpec
    integrity: Integrity | None

    @property
    def payload(self) -> bytes:
        return self.raw[PROLOGUE_BYTES:]

    def header(self) -> Any:
        return json.loads(self.raw[8:PROLOGUE_BYTES])


def sealed(
    facts: TensorSpec, integrity: Integrity | None, key: str = KEY, content: str = "ours"
) -> Sound:
    raw = bytearray(PROLOGUE_BYTES) + dice(content).randbytes(facts.num_bytes)
    seal(memoryview(raw), facts, key, integrity)
    return Sound(bytes(raw), facts, integrity)


SOUND = [
    sealed(TensorSpec(dtype, shape, ATTRIBUTES), integrity)
    for integrity in (None, OURS)
    for dtype, shape in FORMS
]
STRANGE = [
    sealed(TensorSpec(dtype, shape, ATTRIBUTES), integrity, key, "theirs").raw
    for dtype, shape in FORMS[:2]
    for integrity, key in ((None, KEY), (THEIRS, KEY), (OURS, OTHER_KEY))
]


def with_text(raw: bytes, text: bytes) -> bytes:
    """`raw` with another header."""
    head = struct.pack("<Q", HEADER_BYTES) + text[:HEADER_BYTES].ljust(HEADER_BYTES)
    return head + raw[PROLOGUE_BYTES:]


def with_header(raw: bytes, header: Any) -> bytes:
    return with_text(raw, json.dumps(header, separators=(",", ":")).encode())


def with_fitting_checksum(raw: bytes) -> bytes:
    """`raw` with a correct checksum, as an attacker without a key can compute it."""
    try:
        header = json.loads(raw[8:PROLOGUE_BYTES])
        metadata, tensor = header["__metadata__"], header[TENSOR_NAME]
        key, attributes, producer = (
            metadata[f"ecshare.{name}"] for name in ("key", "attributes", "producer")
        )
        signed = [FORMAT_VERSION, key, tensor["dtype"], tensor["shape"], attributes, producer]
        text = json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()
        digest = xxhash.xxh3_128_hexdigest(text + raw[PROLOGUE_BYTES:])
        metadata["ecshare.checksum"] = f"xxh3_128:{digest}"
        return with_header(raw, header)
    except (ValueError, LookupError, TypeError, RecursionError):
        return raw  # it is refused for other reasons than its checksum


# --- damage: accidental, or by a writer who does not know the format ---


def flip_bits(draw: Draw, sound: Sound) -> bytes:
    raw = bytearray(sound.raw)
    used = 8 + len(sound.raw[8:PROLOGUE_BYTES].rstrip())
    where = st.integers(0, len(raw) - 1) | st.integers(0, used - 1)
    for at in draw(st.lists(where, min_size=1, max_size=5)):
        raw[at] ^= 1 << draw(st.integers(0, 7))
    return bytes(raw)


def cut(draw: Draw, sound: Sound) -> bytes:
    edges = st.sampled_from([0, 7, 8, 100, PROLOGUE_BYTES - 1, PROLOGUE_BYTES])
    return sound.raw[: draw(edges | st.integers(0, len(sound.raw) - 1))]


def extend(draw: Draw, sound: Sound) -> bytes:
    more: bytes = draw(st.binary(min_size=1, max_size=40))
    return sound.raw + more


def change_header(draw: Draw, sound: Sound) -> bytes:
    text = written(draw(mutated(sound.header())), ascii_only=draw(st.booleans()))
    return with_text(sound.raw, text)


def change_metadata(draw: Draw, sound: Sound) -> bytes:
    header = sound.header()
    metadata = header["__metadata__"]
    name = draw(st.sampled_from(sorted(metadata)))
    text: str = metadata[name]
    at = draw(st.integers(0, len(text)))
    odd = [
        *ODD_TEXT,
        text.upper(),
        text[:at],
        text[:at] + "x" + text[at + 1 :],
        f"{text}=",
        f"{text} ",
    ]
    metadata[name] = draw(st.sampled_from(odd))
    return with_header(sound.raw, header)


def change_attributes(draw: Draw, sound: Sound) -> bytes:
    header, depth = sound.header(), draw(st.sampled_from([5, 300, 900]))
    odd = [
        *('{"a":' + "[" * depth + "]" * depth + "}", "{" + '"a":{' * min(depth, 500)),
        *('{"a":' + "9" * 3000 + "}", '{"a":1e999}', '{"a":NaN}', '{"\\ud800":1}'),
        *(
            '{"a":' + "[" * 2000,
            '{"a":' * 400,
            '{"a":' + "[" * 1200,
            "null",
            "[]",
            '{"a":"\\u0000"}',
            '{"a":1,"a":2}',
            "",
        ),
    ]
    header["__metadata__"]["ecshare.attributes"] = draw(st.sampled_from(odd))
    return with_header(sound.raw, header)


def change_text(draw: Draw, sound: Sound) -> bytes:
    text = sound.raw[8:PROLOGUE_BYTES].rstrip()
    again = b'"tensor":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    odd = [
        b"{" + again + b"," + text[1:],
        text[:-1] + b"," + again + b"}",
        text.replace(b'"shape":[', b'"shape":[1,1,1,1,1,1,1,', 1),
        text.replace(b"[", b"[ ", 1).replace(b",", b" ,", 3),
        b" \n\t" + text,
        b"\xef\xbb\xbf" + text,
        text.decode().encode("utf-16"),
        b"[" * HEADER_BYTES,
    ]
    return with_text(sound.raw, draw(st.sampled_from(odd)))


def make_up(draw: Draw, sound: Sound) -> bytes:
    front: bytes = draw(st.binary(max_size=64))
    return front + bytes(draw(st.sampled_from([0, PROLOGUE_BYTES])))


# --- forgeries: well-formed, by an attacker without the integrity key ---


def another_object(draw: Draw, sound: Sound) -> bytes:
    strange: bytes = draw(st.sampled_from(STRANGE))
    kept = draw(st.sampled_from([0, PROLOGUE_BYTES]))
    return sound.raw[:kept] + strange[kept:]


def resealed(draw: Draw, sound: Sound) -> bytes:
    """Other content, with some of the genuine one's checksums."""
    attributes = draw(st.sampled_from([ATTRIBUTES, {}, {"num_embeds": 5}]))
    facts = TensorSpec(sound.facts.dtype, sound.facts.shape, attributes)
    forged = sealed(facts, draw(st.sampled_from([None, THEIRS])), content="forged")
    header, genuine = forged.header(), sound.header()
    if draw(st.booleans()):
        header["__metadata__"]["ecshare.mac"] = genuine["__metadata__"]["ecshare.mac"]
    raw = with_header(forged.raw, header)
    return with_fitting_checksum(raw) if draw(st.booleans()) else raw


def other_facts(draw: Draw, sound: Sound) -> bytes:
    """The genuine payload under other facts."""
    header = sound.header()
    match draw(st.sampled_from(["shape", "dtype", "attributes", "producer"])):
        case "shape":
            header["tensor"]["shape"] = [*sound.facts.shape[::-1], 1]
        case "dtype":
            same_size = {"BF16": "F16", "F32": "I32", "U8": "I8", "F64": "I64"}
            header["tensor"]["dtype"] = same_size[sound.facts.dtype]
        case name:
            header["__metadata__"][f"ecshare.{name}"] = "{}"
    return with_fitting_checksum(with_header(sound.raw, header))


Change = Callable[[Draw, Sound], bytes]
DAMAGE: list[Change] = [
    flip_bits, cut, extend, change_header, change_metadata, change_attributes, change_attributes,
    change_text, make_up,
]  # fmt: skip
FORGERY: list[Change] = [another_object, resealed, other_facts]


# --- readers ---


def read_whole(draw: Draw, raw: bytes, sound: Sound) -> None:
    check(unseal(memoryview(raw), KEY, integrity=sound.integrity), sound.facts, sound.payload)


def read_with_running_checksum(draw: Draw, raw: bytes, sound: Sound) -> None:
    running, at = StreamingChecksum(), draw(st.sampled_from([PROLOGUE_BYTES, 5000, 100]))
    pieces = [(0, memoryview(raw)[:at])]
    while at < len(raw):
        size = draw(st.sampled_from([40, 100, PROLOGUE_BYTES]))
        pieces.append((at, memoryview(raw)[at : at + size]))
        at += size
    if draw(st.booleans()):
        pieces[1:] = draw(st.permutations(pieces[1:]))
    for offset, piece in pieces:
        running.take(offset, piece)
    found = unseal(memoryview(raw), KEY, integrity=sound.integrity, streamed=running)
    check(found, sound.facts, sound.payload)


def check(found: Sealed, facts: TensorSpec, payload: bytes) -> None:
    assert bytes(found.payload) == payload, "wrong bytes were taken"
    assert found.spec == facts, "wrong facts were believed"


READERS = [read_whole, read_with_running_checksum]


@fuzzed(400)
@given(st.data())
def test_damaged_objects_are_refused_or_read_correctly(data: st.DataObject) -> None:
    sound = data.draw(st.sampled_from(SOUND))
    raw = data.draw(st.sampled_from(DAMAGE))(data.draw, sound)
    refused = ""
    try:
        data.draw(st.sampled_from(READERS))(data.draw, raw, sound)
    except ObjectCorrupt as exc:
        refused = str(exc)
    assert len(refused) < 1000


@fuzzed(300)
@given(st.data())
def test_readers_with_a_key_refuse_forged_objects(data: st.DataObject) -> None:
    sound = data.draw(st.sampled_from([each for each in SOUND if each.integrity]))
    raw = data.draw(st.sampled_from(FORGERY))(data.draw, sound)
    with contextlib.suppress(ObjectCorrupt):
        data.draw(st.sampled_from(READERS))(data.draw, raw, sound)


@fuzzed(100)
@given(st.data())
def test_unchanged_objects_are_read(data: st.DataObject) -> None:
    """Readers accept unchanged objects."""
    sound = data.draw(st.sampled_from(SOUND))
    data.draw(st.sampled_from(READERS))(data.draw, sound.raw, sound)
