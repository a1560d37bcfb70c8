# SPDX-License-Identifier: Apache-2.0
import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ObjectCorrupt
from ecshare.store.keys import Key, Kind, manifest_key, namespace_digest, object_key
from ecshare.store.manifest import (
    MAX_BYTES,
    MOST_READ,
    Manifest,
    differences,
    list_manifests,
    nearest,
    read_manifest,
    write_manifest,
)
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store

FACTS = {"model": "qwen", "weights": {"a.safetensors": 123}, "dtype": "bfloat16"}
NAMESPACE = namespace_digest(FACTS)


@pytest.fixture
async def store() -> AsyncIterator[ObjectStore]:
    store = open_store(StoreConfig(url=f"memory://{uuid.uuid4().hex}"), "options")
    yield store
    await store.close()


async def test_written_manifest_is_read_back(store: ObjectStore) -> None:
    await write_manifest(store, Kind.EC, NAMESPACE, FACTS)
    await write_manifest(store, Kind.EC, NAMESPACE, FACTS)
    assert await read_manifest(store, Kind.EC, NAMESPACE) == FACTS


async def test_unknown_namespace_has_no_manifest(store: ObjectStore) -> None:
    await write_manifest(store, Kind.EC, NAMESPACE, FACTS)
    assert await read_manifest(store, Kind.KV, NAMESPACE) is None
    assert await read_manifest(store, Kind.EC, "0" * 32) is None


async def test_facts_of_another_namespace_are_refused(store: ObjectStore) -> None:
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
async def test_malformed_manifests_are_refused(store: ObjectStore, body: bytes) -> None:
    await store.put(manifest_key(Kind.EC, NAMESPACE), body)
    with pytest.raises(ObjectCorrupt, match=NAMESPACE):
        await read_manifest(store, Kind.EC, NAMESPACE)


def nested(levels: int) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for _ in range(levels - 1):
        facts = {"a": facts}
    return facts


@pytest.mark.parametrize(
    ("facts", "is_read"),
    [
        (nested(16), True),
        (nested(17), False),
        ({"a": [[[0] * 1000]] * 9}, True),
        ({"a": json.loads("[" * 900 + "]" * 900)}, False),
        ({str(number): 0 for number in range(500)}, True),
        ({str(number): 0 for number in range(501)}, False),
        ({"a": [{"b": 0, "c": 0}] * 300}, False),
    ],
)
async def test_deep_or_large_facts_are_refused(
    store: ObjectStore, facts: dict[str, Any], is_read: bool
) -> None:
    namespace = namespace_digest(facts)
    await store.put(manifest_key(Kind.EC, namespace), json.dumps(facts).encode())
    assert len(await list_manifests(store, Kind.EC)) == is_read
    if not is_read:
        with pytest.raises(ObjectCorrupt, match=namespace):
            await read_manifest(store, Kind.EC, namespace)


async def test_damaged_manifest_is_replaced(store: ObjectStore) -> None:
    await store.put(manifest_key(Kind.EC, NAMESPACE), b"{}")
    await write_manifest(store, Kind.EC, NAMESPACE, FACTS)
    assert await read_manifest(store, Kind.EC, NAMESPACE) == FACTS


async def test_listing_returns_valid_manifests_only(store: ObjectStore) -> None:
    assert await list_manifests(store, Kind.EC) == []
    await write_manifest(store, Kind.EC, NAMESPACE, FACTS)
    other = FACTS | {"epoch": "2"}
    await write_manifest(store, Kind.EC, namespace_digest(other), other)
    await write_manifest(store, Kind.KV, NAMESPACE, FACTS)
    await store.put(manifest_key(Kind.EC, "0" * 32), json.dumps(FACTS).encode())
    await store.put(manifest_key(Kind.EC, "1" * 32), b" " * (MAX_BYTES + 1))
    await store.put(Key("ec/2/manifests/readme.txt"), b"hello")
    await store.put(object_key(Kind.EC, NAMESPACE, "x"), b"an object")
    found = await list_manifests(store, Kind.EC)
    assert {manifest.namespace: manifest.facts for manifest in found} == {
        NAMESPACE: FACTS,
        namespace_digest(other): other,
    }
    assert all(abs((each.modified_s or 0) - time.time()) < 120 for each in found)


async def test_only_the_newest_manifests_are_read(tmp_path: Path) -> None:
    store = open_store(StoreConfig(url=str(tmp_path)), "options")
    for number in range(70):
        facts = {"epoch": str(number)}
        await write_manifest(store, Kind.EC, namespace_digest(facts), facts)
        path = tmp_path / manifest_key(Kind.EC, namespace_digest(facts))
        os.utime(path, (1e9 + number, 1e9 + number))
    epochs = [manifest.facts["epoch"] for manifest in await list_manifests(store, Kind.EC)]
    assert epochs == [str(number) for number in range(69, 5, -1)]
    await store.close()


async def test_oversized_manifests_hide_no_valid_one(store: ObjectStore) -> None:
    """The number of manifests read is bounded, and a stranger may write newer ones."""
    await write_manifest(store, Kind.EC, NAMESPACE, FACTS)
    for number in range(MOST_READ):
        key = manifest_key(Kind.EC, f"{number:032x}")
        await store.put(key, b" " * (MAX_BYTES + 1))
    assert [each.namespace for each in await list_manifests(store, Kind.EC)] == [NAMESPACE]


def test_nearest_has_the_fewest_differing_fields_but_not_none() -> None:
    facts = {"a": 1, "b": 2, "c": 3}
    far, near, same = ({**facts, **change} for change in ({"a": 0, "b": 0}, {"c": 0}, {}))
    others = [Manifest(namespace_digest(each), each, 0.0) for each in (far, near, same)]
    found = nearest(facts, others)
    assert found is not None
    assert found.facts == near
    assert nearest(facts, others[2:]) is None


def test_tier_manifest_is_not_nearest_to_a_connector() -> None:
    connector, tier = {"a": 1}, {"a": 1, "tier": 1}
    both = [Manifest(namespace_digest(each), each, 0.0) for each in (connector, tier)]
    assert nearest(connector, both) is None
    assert nearest(tier, both) is None
    found = nearest({**tier, "b": 2}, both)
    assert found is not None
    assert found.facts == tier


def test_differences_name_the_differing_fields() -> None:
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


def test_differences_of_hostile_facts_are_escaped_and_bounded() -> None:
    odd = {"a\n2026 ERROR": "\x1b[31m" + "x" * 500, "b": "y" * 400 + "1"}
    lines = differences({"b": "y" * 400 + "2"}, odd)
    assert len(lines) == 2
    assert all(len(line) < 500 and line.isprintable() for line in lines)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
)


@given(st.one_of(st.binary(max_size=300), JSON.map(lambda value: json.dumps(value).encode())))
def test_random_manifest_is_refused(body: bytes) -> None:
    async def ask() -> object:
        store = open_store(StoreConfig(url=f"memory://{uuid.uuid4().hex}"), "options")
        await store.put(manifest_key(Kind.EC, NAMESPACE), body)
        listed = await list_manifests(store, Kind.EC)
        try:
            return await read_manifest(store, Kind.EC, NAMESPACE), listed
        except ObjectCorrupt:
            return None, listed

    assert asyncio.run(ask()) == (None, []), "facts of a given digest cannot be made up"


@given(JSON, JSON)
def test_any_two_facts_can_be_compared(one: Any, two: Any) -> None:
    lines = differences({"a": one}, {"a": two})
    assert all(line.isprintable() for line in lines)
    assert bool(lines) == (json.dumps(one, sort_keys=True) != json.dumps(two, sort_keys=True))
