# SPDX-License-Identifier: Apache-2.0
"""Tests a store: does it answer, how fast, and does it return the bytes that were stored."""

import asyncio
import contextlib
import secrets
import statistics
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from ecshare.doctor.findings import Finding, Level, printable
from ecshare.store.cloud.s3_region import wrong_region
from ecshare.store.config import MIB, StoreConfig
from ecshare.store.errors import ObjectMissing, StoreDenied, StoreError
from ecshare.store.fsspec.store import FsspecStore
from ecshare.store.keys import Key
from ecshare.store.objects import Memory, ObjectStore, probe
from ecshare.store.secrets import masked_url

_LOOKUPS = 5
_MAX_REMOVAL_S = 3.0  # from a store that has just failed
_LARGE_BYTES = 8 * MIB


class RoundTrip(NamedTuple):
    """The result of storing and reading a large object."""

    put_s: float
    get_s: float
    is_same: bool
    """True if the bytes that were read are those that were stored."""
    creates_once: bool
    """True if a second put of a key was refused."""
    left: str = ""
    """The key of the object and why it could not be removed; "": it was removed."""


async def check_store(
    store: ObjectStore, config: StoreConfig, *, write: bool
) -> AsyncIterator[Finding]:
    """Yield findings about the store; nothing more after a problem. `write`: also store objects.

    Raises:
        StoreError: the store failed after its first answers.
    """
    try:
        async with asyncio.timeout(config.io_timeout_s):
            has_root = not isinstance(store, FsspecStore) or await store.has_root()
            if has_root:
                # As engines do at start. Only a listing distinguishes a missing bucket from an
                # empty one.
                await probe(store, write=False)
        if not has_root:
            yield missing_folder(config.url)  # on a file server, where a put would create it
            return
        median_s = await _lookup_s(store)
    except (StoreError, TimeoutError) as exc:
        words = printable(str(exc)) or f"no answer within {config.io_timeout_s:g} s"
        fix = await asyncio.to_thread(wrong_region, config) or advice(exc)
        yield Finding("store", Level.PROBLEM, f"{words}; {fix}")
        return
    if median_s is None:
        text = "says that an object exists which no process has stored; is this a store at all?"
        yield Finding("store", Level.PROBLEM, text)
        return
    text = f"answers; a look-up takes {median_s * 1e3:.1f} ms (median of {_LOOKUPS})"
    yield Finding("store", Level.OK, text)
    if write:
        async for finding in _check_writes(store):
            yield finding


def missing_folder(folder: str) -> Finding:
    """Return the finding that the store is a folder that does not exist."""
    text = (
        f"there is no folder {printable(masked_url(folder))}, or this user may not see it; is the "
        "name right, and is the volume mounted? An engine would make an empty folder"
    )
    return Finding("store", Level.PROBLEM, text)


def advice(exc: Exception) -> str:
    """Return what to do about `exc`, for a user who has just written the options."""
    text = str(exc)
    if "bucket does not exist" in text:
        return "it is the first part of the url"
    if isinstance(exc, StoreDenied):
        return (
            "check key and secret, in storage_options or in the environment, and their "
            "permissions; for a folder, its owner and mode"
        )
    return "check the url and storage_options"


async def measure(store: ObjectStore) -> RoundTrip:
    """Store, read and remove a large object.

    Raises:
        StoreError: the store failed. What was stored is removed as far as the store allows.
    """
    body, sink = secrets.token_bytes(_LARGE_BYTES), Memory(_LARGE_BYTES)
    # No slash in the key: a folder store would keep an empty folder.
    key = Key(f"doctor-{secrets.token_hex(8)}")
    try:
        started_s = time.monotonic()
        await store.put(key, body)
        put_s = time.monotonic() - started_s
        creates_once = not await store.put(key, body)
        started_s = time.monotonic()
        await store.get(key, sink)
        get_s = time.monotonic() - started_s
    except BaseException:
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(_MAX_REMOVAL_S):
                await store.delete([key])
        raise
    left = ""
    try:
        await store.delete([key])
    except StoreError as exc:
        left = f"{key} ({printable(str(exc))})"
    return RoundTrip(put_s, get_s, sink.body == body, creates_once, left)


async def _lookup_s(store: ObjectStore) -> float | None:
    """Return the median time of a look-up in seconds. None: the store reports a key that never
    existed.
    """
    key, seconds = Key(f"doctor-{secrets.token_hex(8)}"), []
    for _ in range(_LOOKUPS):
        started_s = time.monotonic()
        (is_stored,) = await store.exists([key])
        seconds.append(time.monotonic() - started_s)
        if is_stored:
            return None
    return statistics.median(seconds)


async def _check_writes(store: ObjectStore) -> AsyncIterator[Finding]:
    try:
        round_trip = await measure(store)
    except StoreDenied as exc:
        text = (
            f"can be read, but not written: {printable(str(exc))}; engines that only load need no "
            "more. --read-only skips this check"
        )
        yield Finding("store", Level.PROBLEM, text)
        return
    except ObjectMissing:
        yield Finding(
            "store",
            Level.PROBLEM,
            "does not find an object that was just stored; do not use this store",
        )
        return
    if not round_trip.is_same:
        yield Finding(
            "store", Level.PROBLEM, "returns other bytes than were stored; do not use this store"
        )
        return
    if round_trip.left:
        text = "stores and returns objects, but does not remove them; engines cannot"
        yield Finding(
            "store", Level.PROBLEM, f"{text} replace damaged ones. Left: {round_trip.left}"
        )
        return
    put, get = (
        _LARGE_BYTES / max(each, 1e-9) / 1e6 for each in (round_trip.put_s, round_trip.get_s)
    )
    text = f"stores, returns and removes objects; put {put:,.0f}, get {get:,.0f} MB/s"
    yield Finding("store", Level.OK, text)
    if not round_trip.creates_once:
        text = "ignores create-only puts: if two engines store the same object, both send it"
        yield Finding("store", Level.NOTE, text)
