# SPDX-License-Identifier: Apache-2.0
"""The epoch of a model in a store: a number that grows with each update of its weights in place.

It is one small object. Engines read it every few seconds, and no reader takes a smaller number than
before: so one that was lost, or put back, changes nothing for engines that run.
"""

import re
import time

from ecshare.store.errors import ObjectCorrupt, ObjectMissing, StoreUnavailable
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Key, epoch_key
from ecshare.store.objects import ObjectStore, read

FACT = "updates"
"""The fact of a namespace that contains the epoch's number. In epoch 0 there is none."""
MOST = 10**15 - 1
READ_EVERY_S = 5.0
"""Engines read the epoch this often."""
_LIMIT_BYTES = 256
# A header of an object is JSON, so nothing that is signed for an object begins like this.
_HEAD = "ecshare epoch 1"
_BODY = re.compile(_HEAD.encode() + rb"\n([1-9][0-9]{0,14})\n([0-9a-f]{64})?")
_MAC_PREFIX = "blake3:"


async def read_epoch(store: ObjectStore, model: str, integrity: Integrity | None) -> int:
    """Return the number of the epoch of `model`; 0: none is there, or none that is valid.

    Raises:
        StoreError: the store failed.
    """
    try:
        body = await read(store, key_of(model, integrity), _LIMIT_BYTES)
    except (ObjectMissing, ObjectCorrupt):
        return 0
    found = _BODY.fullmatch(bytes(body))
    if found is None:
        return 0
    number, mac = int(found[1]), (found[2] or b"").decode()
    return number if _is_valid(model, number, mac, integrity) else 0


async def next_epoch(store: ObjectStore, model: str, integrity: Integrity | None) -> int:
    """Begin an epoch of `model`, and return its number.

    It is the time in milliseconds. So it is larger than all before it even if their object was
    lost, and two commands at once have different ones.

    Raises:
        StoreError: the store failed, or there is no larger number.
    """
    number = max(await read_epoch(store, model, integrity) + 1, time.time_ns() // 1_000_000)
    if number > MOST:
        key = key_of(model, integrity)
        raise StoreUnavailable(f"somebody has taken the largest number: remove {key}")
    await write_epoch(store, model, number, integrity)
    return number


async def write_epoch(
    store: ObjectStore, model: str, number: int, integrity: Integrity | None
) -> None:
    """Write the object of an epoch, or write it again, so that no expiry rule removes it.

    Raises:
        StoreError: the store failed.
    """
    mac = ""
    if integrity is not None:
        mac = integrity.mac(_signed(model, number), memoryview(b"")).removeprefix(_MAC_PREFIX)
    body = f"{_HEAD}\n{number}\n{mac}".encode()
    await store.put(key_of(model, integrity), body, replace=True)


def key_of(model: str, integrity: Integrity | None) -> Key:
    """Return the key of the epoch of `model` for engines with this integrity key."""
    return epoch_key(model, integrity.name if integrity is not None else "")


def _is_valid(model: str, number: int, mac: str, integrity: Integrity | None) -> bool:
    if integrity is None:
        return not mac
    return integrity.accepts(_MAC_PREFIX + mac, _signed(model, number), memoryview(b""))


def _signed(model: str, number: int) -> bytes:
    return f"{_HEAD}\n{number}\n{model}".encode("utf-8", "surrogatepass")
