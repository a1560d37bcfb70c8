# SPDX-License-Identifier: Apache-2.0
"""Finds out why engines do not share: is the store well, and do their facts agree.

Reads what lies in the store and writes one object of its own, which it removes again. Needs neither
torch nor vLLM. Nothing in the store is believed: it is shown, bounded and escaped.
"""

import asyncio
import os
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from datetime import UTC, datetime
from enum import Enum
from itertools import groupby
from typing import NamedTuple

from ecshare.store.config import StoreConfig, masked_url
from ecshare.store.errors import ConfigError, ObjectCorrupt, ObjectMissing, StoreError
from ecshare.store.format import unseal
from ecshare.store.hostcache import open_host_cache
from ecshare.store.integrity import Integrity, open_integrity
from ecshare.store.keys import PROBE_KEY, Kind, is_object_key, namespace_prefix
from ecshare.store.manifest import Manifest, differences, list_manifests, nearest
from ecshare.store.objects import ObjectStore, open_store, read

MIB = 1 << 20
_ROUNDS = 5
_LARGE_BYTES = 8 * MIB
_MOST_COUNTED = 100_000
_LARGEST_SAMPLED = 256 * MIB
_KINDS = {Kind.EC: "embeddings", Kind.KV: "KV blocks"}


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "PROBLEM"


class Finding(NamedTuple):
    """One line of the report, and what belongs below it."""

    topic: str
    level: Level
    text: str
    details: tuple[str, ...] = ()


async def examine(
    config: StoreConfig, path: str, *, write: bool = True, sample: int = 20
) -> AsyncIterator[Finding]:
    """Yield what is found out about the store of `config`, each finding when it is there.

    `path`: where the user wrote the options, for messages. `write`: try to store an object, too.
    `sample`: how many objects of each namespace to read and verify.

    Raises:
        ConfigError: an option is wrong; names it and the fix.
    """
    integrity = open_integrity(config.integrity_key, path)
    store = open_store(config, path)
    try:
        yield Finding("options", Level.OK, f"{path} are well-formed; url {masked_url(config.url)}")
        async for finding in _bounded(_store(store, write=write), config):
            yield finding
            if finding.level is Level.PROBLEM:
                return
        for finding in _host(config):
            yield finding
        for kind in Kind:
            async for finding in _bounded(_namespaces(store, kind, integrity, sample), config):
                yield finding
    finally:
        await store.close()


async def _bounded(findings: AsyncIterator[Finding], config: StoreConfig) -> AsyncIterator[Finding]:
    """Pass on `findings`; a store that fails, or is silent for too long, is one more."""
    limit_s = config.call_timeout_s
    try:
        while True:
            async with asyncio.timeout(limit_s):
                finding = await anext(findings)
            yield finding
    except StopAsyncIteration:
        return
    except TimeoutError:
        yield Finding("store", Level.PROBLEM, f"no answer within {limit_s:g} s; is it up?")
    except StoreError as exc:
        yield Finding("store", Level.PROBLEM, f"{exc}; check the url and storage_options")


# --- the store ---


async def _store(store: ObjectStore, *, write: bool) -> AsyncIterator[Finding]:
    seconds = []
    for _ in range(_ROUNDS):
        started_s = time.monotonic()
        await store.exists([PROBE_KEY])
        seconds.append(time.monotonic() - started_s)
    yield Finding("store", Level.OK, f"answers; a look-up takes {_ms(seconds)}")
    if not write:
        return
    key = f"probe/doctor-{secrets.token_hex(8)}"
    body = secrets.token_bytes(_LARGE_BYTES)
    try:
        started_s = time.monotonic()
        await store.put(key, body)
        put_s = time.monotonic() - started_s
        is_refused = not await store.put(key, body)
        started_s = time.monotonic()
        is_same = bytes(await read(store, key, _LARGE_BYTES)) == body
        get_s = time.monotonic() - started_s
    finally:
        await store.delete([key])
    if not is_same:
        yield Finding("store", Level.PROBLEM, "returns other bytes than were put; do not use it")
        return
    rates = f"put {_LARGE_BYTES / put_s / 1e6:,.0f}, get {_LARGE_BYTES / get_s / 1e6:,.0f}"
    yield Finding("store", Level.OK, f"takes objects, gives them back, removes them; {rates} MB/s")
    if not is_refused:
        text = "ignores create-only puts: two engines that store the same object both send it"
        yield Finding("store", Level.NOTE, text)


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms (median of {len(seconds)})"


# --- this host ---


def _host(config: StoreConfig) -> Iterator[Finding]:
    try:
        cache = open_host_cache(config)
    except ConfigError as exc:
        yield Finding("host cache", Level.PROBLEM, str(exc))
        return
    disk = os.statvfs(cache.root)
    free = disk.f_bavail * disk.f_frsize
    used = sum(path.stat().st_size for path in cache.root.iterdir() if path.is_file())
    yield Finding(
        "host cache",
        Level.OK,
        f"{cache.root} holds {_size(used)} of at most {_size(cache.limit_bytes)}; "
        f"the disk has {_size(free)} free",
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


# --- what is stored ---


async def _namespaces(
    store: ObjectStore, kind: Kind, integrity: Integrity | None, sample: int
) -> AsyncIterator[Finding]:
    what = _KINDS[kind]
    manifests = await list_manifests(store, kind)
    if not manifests:
        yield Finding(what, Level.NOTE, "no engine that stores any has used this store yet")
    for manifest in manifests:
        finding, keys = await _namespace(store, kind, manifest, sample)
        yield finding
        if manifest.facts.get("integrity", "") == (integrity.fingerprint if integrity else ""):
            yield await _sampled(store, kind, manifest.namespace, integrity, keys)
        else:
            text = f"{manifest.namespace}: not sampled, it was written with another integrity_key"
            yield Finding(what, Level.NOTE, text)
    for finding in _compared(kind, manifests):
        yield finding


async def _namespace(
    store: ObjectStore, kind: Kind, manifest: Manifest, sample: int
) -> tuple[Finding, list[str]]:
    """Count what a namespace holds; return the keys of its first `sample` objects, too."""
    keys: list[str] = []
    num_objects = num_bytes = num_odd = 0
    async with aclosing(store.list(namespace_prefix(kind, manifest.namespace))) as found:  # type: ignore[type-var]
        async for info in found:
            if not is_object_key(info.key):
                num_odd += 1
                continue
            if len(keys) < sample:
                keys.append(info.key)
            num_objects += 1
            num_bytes += info.num_bytes
            if num_objects == _MOST_COUNTED:
                break
    more = " or more" if num_objects == _MOST_COUNTED else ""
    odd = (f"{num_odd} files there are none of ours; engines ignore them",) if num_odd else ()
    since = datetime.fromtimestamp(manifest.modified_s, UTC)
    facts = manifest.facts
    shown = [f"{name} {_word(facts.get(name))}" for name in ("model", "dtype", "epoch", "weights")]
    found_there = Finding(
        _KINDS[kind],
        Level.OK,
        f"{manifest.namespace}: {num_objects:,}{more} objects, {_size(num_bytes)}{more}, "
        f"since {since:%Y-%m-%d %H:%M} UTC",
        (", ".join(shown), *odd),
    )
    return found_there, keys


def _word(value: object) -> str:
    return ascii(value)[:100]


async def _sampled(
    store: ObjectStore, kind: Kind, namespace: str, integrity: Integrity | None, keys: list[str]
) -> Finding:
    damaged = []
    for key in keys:
        try:
            unseal(await read(store, key, _LARGEST_SAMPLED), key, integrity=integrity)
        except ObjectMissing:
            continue  # expired meanwhile
        except ObjectCorrupt as exc:
            damaged.append(f"{key}: {exc}")
    text = f"{namespace}: {len(damaged)} of {len(keys)} objects that were read are damaged"
    if damaged:
        text += "; engines encode or compute those again, and replace them"
    return Finding(_KINDS[kind], Level.PROBLEM if damaged else Level.OK, text, tuple(damaged[:5]))


def _compared(kind: Kind, manifests: list[Manifest]) -> Iterator[Finding]:
    """Say of each pair of neighbours, once, what keeps them apart."""

    def said(manifest: Manifest) -> tuple[str, ...]:
        other = nearest(manifest.facts, manifests)
        return tuple(sorted((manifest.namespace, other.namespace))) if other else ()

    facts = {manifest.namespace: manifest.facts for manifest in manifests}
    for pair, _ in groupby(sorted(map(said, manifests))):
        if pair:
            one, two = pair
            text = f"engines of {one} and of {two} share nothing, because of:"
            lines = tuple(differences(facts[one], facts[two]))
            yield Finding(_KINDS[kind], Level.NOTE, text, lines)
