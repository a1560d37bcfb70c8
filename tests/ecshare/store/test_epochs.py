# SPDX-License-Identifier: Apache-2.0
"""The epoch in a store: forged, damaged, lost, and with clocks that differ."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.epochs import MOST, key_of, next_epoch, read_epoch, write_epoch
from ecshare.store.errors import StoreUnavailable
from ecshare.store.integrity import Integrity
from ecshare.store.objects import ObjectStore, read
from ecshare.store.open import open_store

MODEL = "Qwen/Qwen2.5-VL \ud800"
KEY = Integrity(b"k" * 32, name="team")
OTHER = Integrity(b"o" * 32, name="team")
CHANGING = Integrity(b"n" * 32, b"k" * 32, name="team")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ObjectStore]:
    opened = open_store(StoreConfig(url=f"file://{tmp_path}/store"), "options")
    yield opened
    await opened.close()


@pytest.mark.parametrize("integrity", [None, KEY])
async def test_each_epoch_has_a_larger_number(
    store: ObjectStore, integrity: Integrity | None
) -> None:
    numbers = [await read_epoch(store, MODEL, integrity)]
    for _ in range(3):
        numbers.append(await next_epoch(store, MODEL, integrity))
        assert await read_epoch(store, MODEL, integrity) == numbers[-1]
    assert numbers[0] == 0
    assert numbers == sorted(set(numbers))
    assert await read_epoch(store, "another model", integrity) == 0


async def test_lost_object_makes_no_number_smaller(store: ObjectStore) -> None:
    """Or engines would not hear of the next update."""
    before = await next_epoch(store, MODEL, None)
    await store.delete([key_of(MODEL, None)])
    await asyncio.sleep(0.002)
    assert await next_epoch(store, MODEL, None) > before


async def test_clock_that_is_behind_makes_no_number_smaller(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await next_epoch(store, MODEL, None)
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    assert await next_epoch(store, MODEL, None) == before + 1


@pytest.mark.parametrize("forger", [None, OTHER])
async def test_forged_epoch_counts_only_without_a_key(
    store: ObjectStore, forger: Integrity | None
) -> None:
    await write_epoch(store, MODEL, 77, forger)
    body = bytes(await read(store, key_of(MODEL, forger), 1000))
    await store.put(key_of(MODEL, KEY), body, replace=True)
    assert await read_epoch(store, MODEL, KEY) == 0
    assert await read_epoch(store, MODEL, forger) == 77


async def test_epoch_of_another_model_or_number_is_not_valid(store: ObjectStore) -> None:
    await write_epoch(store, "another", 1, KEY)
    genuine = bytes(await read(store, key_of("another", KEY), 1000))
    await store.put(key_of(MODEL, KEY), genuine)
    assert await read_epoch(store, MODEL, KEY) == 0
    await store.put(key_of("another", KEY), genuine.replace(b"\n1\n", b"\n2\n"), replace=True)
    assert await read_epoch(store, "another", KEY) == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"7",
        b"ecshare epoch 1\n-7\n",
        b"ecshare epoch 1\n07\n",
        b"ecshare epoch 1\n7",
        b"ecshare epoch 1\n7\n\x1b[31m",
        b"ecshare epoch 1\n" + b"9" * 16 + b"\n",
        b"ecshare epoch 1\n" + b"9" * 5000 + b"\n",
        "ecshare epoch 1\n\u0667\n".encode(),
        b"\x00" * (8 << 20),
    ],
    ids=range(10),
)
async def test_damaged_epoch_is_none_and_the_command_replaces_it(
    store: ObjectStore, body: bytes
) -> None:
    await store.put(key_of(MODEL, None), body)
    assert await read_epoch(store, MODEL, None) == 0
    number = await next_epoch(store, MODEL, None)
    assert await read_epoch(store, MODEL, None) == number


async def test_epoch_of_the_accepted_key_counts_while_the_key_is_changed(
    store: ObjectStore,
) -> None:
    old = await next_epoch(store, MODEL, KEY)
    assert await read_epoch(store, MODEL, CHANGING) == old
    new = await next_epoch(store, MODEL, CHANGING)
    assert await read_epoch(store, MODEL, CHANGING) == new > old
    assert await read_epoch(store, MODEL, KEY) == 0


async def test_engines_with_other_keys_have_epochs_of_their_own(store: ObjectStore) -> None:
    await next_epoch(store, MODEL, None)
    assert await read_epoch(store, MODEL, KEY) == 0
    assert await read_epoch(store, MODEL, Integrity(b"k" * 32)) == 0


async def test_largest_number_is_a_failure_that_names_the_object(store: ObjectStore) -> None:
    await write_epoch(store, MODEL, MOST, None)
    with pytest.raises(StoreUnavailable, match=key_of(MODEL, None)):
        await next_epoch(store, MODEL, None)
