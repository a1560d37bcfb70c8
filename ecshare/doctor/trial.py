# SPDX-License-Identifier: Apache-2.0
"""Tries a store: does it answer, how fast, and does it give back what it was given."""

import asyncio
import contextlib
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from ecshare.doctor.endpoint import oddity
from ecshare.doctor.findings import Finding, Level, printable, words
from ecshare.store.config import MIB, StoreConfig
from ecshare.store.errors import ObjectMissing, StoreDenied, StoreError
from ecshare.store.fsspec_store import FsspecStore
from ecshare.store.objects import Memory, ObjectStore, probe
from ecshare.store.secrets import masked_url

_LOOK_UPS = 5
_ROUNDS = 3
_ENOUGH_S = 3.0  # a slow store is not asked for another round
_LARGE_BYTES = 8 * MIB


class Trial(NamedTuple):
    """What came of storing and reading a large object a few times."""

    num_rounds: int
    put_s: float
    """The shortest of them; so is `get_s`."""
    get_s: float
    is_same: bool
    """Whether the bytes that came back are those that were put."""
    creates_once: bool
    """Whether a second put of a key was refused."""
    left: str = ""
    """The key of an object that could not be removed, and why; "": they all were."""


async def try_out(
    store: ObjectStore, config: StoreConfig, *, write: bool
) -> AsyncIterator[Finding]:
    """Yield what is found; after a problem nothing more. `write`: store objects, too.

    Raises StoreError: it fails later than at first.
    """
    try:
        if isinstance(store, FsspecStore) and not await store.has_root():
            yield missing_folder(config.url)  # on a server of files, where a put would make it
            return
        # As an engine does at start. A listing tells a bucket that is missing from an empty one.
        await probe(store, write=False)
        median_s = await _look_up(store)
    except StoreError as exc:
        odd = await asyncio.to_thread(oddity, config)
        yield Finding("store", Level.PROBLEM, odd or f"{words(exc)}; {fix(exc)}")
        return
    if median_s is None:
        odd = await asyncio.to_thread(oddity, config)
        text = odd or "says of a key that nobody ever used that it is there; do not use it"
        yield Finding("store", Level.PROBLEM, text)
        return
    text = f"answers; a look-up takes {median_s * 1e3:.1f} ms (median of {_LOOK_UPS})"
    yield Finding("store", Level.OK, text)
    if write:
        async for finding in _stored(store):
            yield finding


def missing_folder(folder: str) -> Finding:
    """Say that the store is a folder that is not there."""
    text = (
        f"there is no folder {printable(masked_url(folder))}, or this user may not see it; is the "
        "name right, and the volume mounted? An engine would make it, and find nothing there"
    )
    return Finding("store", Level.PROBLEM, text)


def fix(exc: StoreError) -> str:
    """Say what to do about `exc`, for somebody who has just written the options."""
    text = str(exc)
    if "bucket does not exist" in text:
        return "it is the first part of the url"
    if isinstance(exc, StoreDenied):
        return (
            "check key and secret, in storage_options or in the environment, and what they may do "
            "there; of a folder, its owner and mode"
        )
    return "check the url and storage_options"


async def measure(store: ObjectStore, now_s: Callable[[], float] = time.monotonic) -> Trial:
    """Put, read and remove a large object, under a new key each time; return the best figures.

    `now_s`: the clock. It stops after a few seconds, with what it has, or when an object cannot be
    removed again.

    Raises StoreError: the store failed. What was put is removed, as far as it lets us.
    """
    body = secrets.token_bytes(_LARGE_BYTES)
    puts_s: list[float] = []
    gets_s: list[float] = []
    is_same = creates_once = True
    left = ""
    ends_s = now_s() + _ENOUGH_S
    while len(gets_s) < _ROUNDS and not left and (not gets_s or now_s() < ends_s):
        # Not below a level of its own: a folder store would keep an empty folder.
        key = f"doctor-{secrets.token_hex(8)}"
        try:
            started_s = now_s()
            await store.put(key, body)
            puts_s.append(now_s() - started_s)
            if len(puts_s) == 1:
                creates_once = not await store.put(key, body)
            sink = Memory(_LARGE_BYTES)
            started_s = now_s()
            await store.get(key, sink)
            gets_s.append(now_s() - started_s)
            is_same = is_same and sink.body == body
        except BaseException:
            with contextlib.suppress(StoreError):
                await store.delete([key])
            raise
        try:
            await store.delete([key])
        except StoreError as exc:
            left = f"{key} ({words(exc)})"
    return Trial(len(gets_s), min(puts_s), min(gets_s), is_same, creates_once, left)


async def _look_up(store: ObjectStore) -> float | None:
    """Return how long a look-up takes, in seconds. None: a key that never was is there."""
    key, seconds = f"doctor-{secrets.token_hex(8)}", []
    for _ in range(_LOOK_UPS):
        started_s = time.monotonic()
        (is_there,) = await store.exists([key])
        seconds.append(time.monotonic() - started_s)
        if is_there:
            return None
    return statistics.median(seconds)


async def _stored(store: ObjectStore) -> AsyncIterator[Finding]:
    try:
        trial = await measure(store)
    except StoreDenied as exc:
        text = f"may be read, but not written: {words(exc)}; engines that only load need no more, "
        yield Finding("store", Level.PROBLEM, f"{text}and --read-only does not try it")
        return
    except ObjectMissing:
        yield Finding("store", Level.PROBLEM, "does not find what was just stored; do not use it")
        return
    if not trial.is_same:
        yield Finding("store", Level.PROBLEM, "returns other bytes than were put; do not use it")
        return
    if trial.left:
        text = "takes objects and gives them back, but does not remove them; engines could not"
        yield Finding("store", Level.PROBLEM, f"{text} replace damaged ones. Left: {trial.left}")
        return
    put, get = (_LARGE_BYTES / max(each, 1e-9) / 1e6 for each in (trial.put_s, trial.get_s))
    text = (
        "takes objects, gives them back, removes them; "
        f"put {put:,.0f}, get {get:,.0f} MB/s (best of {trial.num_rounds})"
    )
    yield Finding("store", Level.OK, text)
    if not trial.creates_once:
        text = "ignores create-only puts: two engines that store the same object both send it"
        yield Finding("store", Level.NOTE, text)
