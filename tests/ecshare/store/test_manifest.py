# SPDX-License-Identifier: Apache-2.0
import json
import uuid
from collections.abc import AsyncIterator

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ObjectCorrupt
from ecshare.store.keys import Kind, manifest_key, namespace_digest
from ecshare.store.manifest import MAX_BYTES, differences, read_manifest, write_manifest
from ecshare.store.objects import ObjectStore, open_store

FACTS = {"model": "qwen", "weights": {"a.safetensors": 123}, "dtype": "bfloat16"}
NAMESPACE = namespace_digest(FACTS)


@pytest.fixture
async def store() -> AsyncIterator[ObjectStore]:
    store = open_store(StoreConfig(url=f"memory://{uuid.uuid4().hex}"), "options")
    yield store
    await store.close()


async def test_what_is_written_is_read(store: ObjectStore) -> None:
    await write_manifest(store, Kind.EC, NAMESPACE, FACTS)
    await write_manifest(store, Kind.EC, NAMESPACE, FACTS)
    assert await read_manifest(store, Kind.EC, NAMESPACE) == FACTS


async def test_a_namespace_nobody_wrote_has_none(store: ObjectStore) -> None:
    await write_manifest(store, Kind.EC, NAMESPACE, FACTS)
    assert await read_manifest(store, Kind.KV, NAMESPACE) is None
    assert await read_manifest(store, Kind.EC, "0" * 32) is None


async def test_facts_of_another_namespace_are_not_written(store: ObjectStore) -> None:
    with pytest.raises(ValueError, match="digest"):
        await write_manifest(store, Kind.EC, "0" * 32, FACTS)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"a":NaN}',
        json.dumps(FACTS).encode() + b" " * MAX_BYTES,
    ],
)
async def test_odd_manifests_are_refused(store: ObjectStore, body: bytes) -> None:
    await store.put(manifest_key(Kind.EC, NAMESPACE), body)
    with pytest.raises(ObjectCorrupt, match=NAMESPACE):
        await read_manifest(store, Kind.EC, NAMESPACE)


def test_the_fields_that_differ_are_named() -> None:
    other = {"model": "qwen", "weights": {"a.safetensors": 124, "b": 1}, "epoch": "2"}
    assert differences(FACTS, other) == [
        'dtype: "bfloat16" != (none)',
        'epoch: (none) != "2"',
        "weights.a.safetensors: 123 != 124",
        "weights.b: (none) != 1",
    ]
    assert differences(FACTS, dict(FACTS)) == []
    assert differences({"shape": (1, 2)}, {"shape": [1, 2]}) == []
    assert differences({"a": {"b": 1}}, {"a": 1}) == ['a: {"b": 1} != 1']
    assert differences({"a": 1}, {"a": True}) == ["a: 1 != true"]
