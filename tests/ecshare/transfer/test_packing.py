# SPDX-License-Identifier: Apache-2.0
"""Objects whose exponents are compressed in the store: round trips, and hostile bytes, which are
refused."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ecshare.store import format as stored_format
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError, ObjectCorrupt
from ecshare.store.format import ITEM_BYTES, PROLOGUE_BYTES, TensorSpec, seal, unseal
from ecshare.store.integrity import Integrity
from ecshare.store.keys import FORMAT_VERSION, Kind, object_key
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Backfill, Fetch, Outcome, Put, StoredObject, Tier
from ecshare.transfer.packing import Packing
from tests.ecshare.transfer.test_fetch import Scripted, finish

KEY = object_key(Kind.KV, "0" * 32, "a")
ATTRIBUTES = {"chunk": "0" * 64, "order": "head token"}
LIMIT_BYTES = 1 << 24
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
SECRET = "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2"


def body_of(payload: bytes, dtype: str, integrity: Integrity | None = None) -> memoryview:
    """Make a sealed object with this payload."""
    body = memoryview(bytearray(PROLOGUE_BYTES) + payload)
    spec = TensorSpec(dtype, (len(payload) // ITEM_BYTES[dtype],), ATTRIBUTES)
    seal(body, spec, KEY, integrity)
    return body


def drawn(dtype: str, count: int = 300_001) -> bytes:
    """Draw numbers like those of KV, and NaN, infinity and zeros."""
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    numbers[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0]).to(DTYPES[dtype])
    return numbers.view(torch.uint8).numpy().tobytes()


def unpacked(body: Any, integrity: Integrity | None = None) -> memoryview | None:
    sealed = unseal(memoryview(body), KEY, integrity=integrity)
    return Packing("x").unpack(sealed, KEY, LIMIT_BYTES, integrity)


@pytest.mark.parametrize("integrity", [None, Integrity(SECRET.encode())])
@pytest.mark.parametrize(("dtype", "most"), [("BF16", 0.75), ("F16", 0.9), ("F32", 0.9)])
def test_unpacked_object_equals_the_packed_one(
    dtype: str, most: float, integrity: Integrity | None
) -> None:
    body = body_of(drawn(dtype), dtype, integrity)
    packed = memoryview(Packing("x").pack(body, KEY, integrity))
    assert len(packed) < most * len(body)
    again = unpacked(packed, integrity)
    assert again is not None
    assert bytes(again) == bytes(body)


@given(st.sampled_from(list(DTYPES)), st.binary(max_size=64), st.integers(1, 64))
def test_any_payload_survives_a_round_trip(dtype: str, bits: bytes, times: int) -> None:
    """The payload repeats a few bits, so that packing pays."""
    payload = bits[: len(bits) // 4 * 4] * (100 * times)
    body = body_of(payload, dtype)
    packed = Packing("x").pack(body, KEY, None)
    assert bytes(unpacked(packed) or packed) == bytes(body)


@pytest.mark.parametrize("dtype", ["U8", "F8_E4M3", "I32", "BF16"])
def test_incompressible_object_is_not_packed(dtype: str) -> None:
    noise = np.random.default_rng(1).bytes(100_000)
    body = body_of(noise, dtype)
    assert Packing("x").pack(body, KEY, None) is body
    assert unpacked(body) is None
    empty = body_of(b"", dtype)
    assert Packing("x").pack(empty, KEY, None) is empty


# --- hostile bytes in otherwise valid objects ---


def forged(payload: bytes, **changes: Any) -> memoryview:
    of = {"dtype": "BF16", "shape": [1000], "attributes": {}} | changes
    body = memoryview(bytearray(PROLOGUE_BYTES) + payload)
    seal(body, TensorSpec("U8", (len(payload),), {"packed": "zstd", "of": of}), KEY)
    return body


def forged_deep(levels: int) -> memoryview:
    """Make an object with nested attributes that `seal` would not write."""
    deep = f'{{"a":{"[" * levels}{"]" * levels}}}'
    of = f'{{"dtype":"BF16","shape":[1000],"attributes":{deep}}}'
    body = memoryview(bytearray(PROLOGUE_BYTES) + SOUND)
    spec = TensorSpec("U8", (len(SOUND),))
    metadata = stored_format._Metadata(
        format=str(FORMAT_VERSION),
        key=str(KEY),
        checksum="",
        attributes=f'{{"packed":"zstd","of":{of}}}',
        producer="1",
    )
    metadata.checksum = stored_format._checksum(
        stored_format._signed_fields(spec, metadata), body[PROLOGUE_BYTES:]
    )
    tensor = stored_format._Tensor(dtype="U8", shape=spec.shape, data_offsets=(0, len(SOUND)))
    header = msgspec.json.encode(stored_format._Header(metadata=metadata, tensor=tensor))
    body[:PROLOGUE_BYTES] = (4088).to_bytes(8, "little") + header.ljust(4088)
    return body


def frame(count: int, *, tells: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=tells).compress(bytes(count))


SOUND = bytes(1000) + frame(1000)


def test_forged_object_without_a_fault_is_accepted() -> None:
    again = unpacked(forged(SOUND))
    assert again is not None
    assert len(again) == PROLOGUE_BYTES + 2000


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        bytes(999),
        bytes(1000),
        bytes(1000) + b"no frame",
        bytes(1000) + frame(999),
        bytes(1000) + frame(1 << 26),
        bytes(1000) + frame(1000, tells=False),
        bytes(1000) + frame(1000)[:-1],
        bytes(1000) + frame(1000) + b"more",
        bytes(999) + frame(1000),
    ],
)
def test_malformed_packed_payload_is_refused(payload: bytes) -> None:
    with pytest.raises(ObjectCorrupt, match=r"packed|unpacked"):
        unpacked(forged(payload))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "U8"},
        {"dtype": "F128"},
        {"shape": [-1000]},
        {"shape": [1 << 47]},
        {"shape": [1000] * 9},
        {"shape": [LIMIT_BYTES // 2]},
        {"shape": "1000"},
        {"attributes": []},
        {"more": 1},
    ],
)
def test_malformed_packed_spec_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ObjectCorrupt, match="it is packed, and"):
        unpacked(forged(SOUND, **changes))


def test_deeply_nested_attributes_raise_only_object_corrupt() -> None:
    """Some depths can be parsed but not written, since writing needs more of Python's stack."""
    refused = []
    for levels in range(900, 1000):
        try:
            unpacked(forged_deep(levels))
        except ObjectCorrupt as exc:
            refused.append(str(exc))
    assert any("too many levels" in each for each in refused)


@given(st.integers(0, len(SOUND) - 1), st.integers(1, 255))
def test_changed_payload_byte_raises_only_object_corrupt(place: int, change: int) -> None:
    payload = bytearray(SOUND)
    payload[place] ^= change
    try:
        again = unpacked(forged(bytes(payload)))
    except ObjectCorrupt:
        return
    assert again is not None
    assert len(again) == PROLOGUE_BYTES + 2000


def test_missing_zstandard_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"options\.compression: .* pip install zstandard"):
        Packing("options.compression")


# --- in a transfer engine ---

Start = Callable[..., TransferEngine]
SPEC = TensorSpec("BF16", (300_001,), ATTRIBUTES)


@pytest.fixture
def store() -> Scripted:
    return Scripted()


@pytest.fixture
def start(tmp_path: Path, store: Scripted) -> Iterator[Start]:
    started = []

    def start(host: str, **options: Any) -> TransferEngine:
        config = StoreConfig(
            url=f"file://{tmp_path}/none", host_cache_dir=str(tmp_path / host), **options
        )
        engine = TransferEngine(config, "options", store=store, packing=Packing("x"))
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()


def put(engine: TransferEngine) -> bytes:
    """Store an object and return its payload."""
    slab = Staging(torch.device("cpu"), 1 << 22).reserve(SPEC)
    assert slab is not None
    slab.payload.view(torch.uint8).copy_(
        torch.frombuffer(bytearray(drawn("BF16")), dtype=torch.uint8)
    )
    payload = bytes(slab.body[PROLOGUE_BYTES:])
    done = finish(engine, Put(KEY, slab))
    assert done.outcome is Outcome.OK
    moved = {each.tier: each.num_bytes for each in done.moved}
    assert moved[Tier.STORE] < 0.75 * moved[Tier.HOST]
    return payload


@pytest.mark.parametrize("secret", ["", SECRET])
@pytest.mark.parametrize("room", [{}, {"host_cache_bytes": 1}])
def test_object_is_packed_in_the_store_and_unpacked_on_hosts(
    start: Start, store: Scripted, secret: str, room: dict[str, int]
) -> None:
    writer, reader = start("a", integrity_key=secret), start("b", integrity_key=secret, **room)
    payload = put(writer)
    integrity = Integrity(secret.encode()) if secret else None
    packed = unseal(memoryview(store.objects[KEY]), KEY, integrity=integrity)
    assert packed.spec.attributes["packed"] == "zstd"
    for _ in range(2):
        reader.submit(Fetch(KEY, 20))
        (done,) = reader.drain(20)
        assert isinstance(done.value, StoredObject)
        assert done.value.spec == SPEC
        assert bytes(done.value.payload) == payload
        done.value.release()
    assert len(store.gets) == (2 if room else 1), (
        "the second fetch reads the host cache, if it has room"
    )


def test_backfill_packs_the_object_again(start: Start, store: Scripted) -> None:
    engine = start("a")
    put(engine)
    before = store.objects.pop(KEY)
    done = finish(engine, Backfill(KEY))
    assert done.value is True
    assert store.objects[KEY] == before
    assert finish(engine, Backfill(KEY)).value is False


def test_malformed_packed_object_is_a_corrupt_miss(start: Start, store: Scripted) -> None:
    """It is valid otherwise, including its checksum."""
    store.objects[KEY] = bytes(forged(bytes(1000) + frame(999)))
    done = finish(start("a"), Fetch(KEY, 20))
    assert done.outcome is Outcome.CORRUPT


def test_object_beyond_the_limit_is_not_unpacked(start: Start) -> None:
    payload = put(start("a"))
    limit = PROLOGUE_BYTES + len(payload)
    reader = start("b")
    assert finish(reader, Fetch(KEY, 20, limit - 1)).outcome is Outcome.CORRUPT
    put(start("c"))
    assert finish(start("d"), Fetch(KEY, 20, limit)).outcome is Outcome.OK
