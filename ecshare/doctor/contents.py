# SPDX-License-Identifier: Apache-2.0
"""Examines what a store contains: size, damage, and the facts in which its namespaces differ."""

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby

from ecshare.doctor.findings import Finding, Level, printable, readable_size
from ecshare.store.config import MIB
from ecshare.store.epochs import FACT
from ecshare.store.errors import ObjectCorrupt, ObjectMissing
from ecshare.store.format import unseal
from ecshare.store.integrity import Integrity
from ecshare.store.keys import (
    Key,
    Kind,
    is_namespace,
    is_object_key,
    kind_prefix,
    manifest_key,
    namespace_prefix,
)
from ecshare.store.manifest import (
    MOST_READ,
    Manifest,
    differences,
    list_manifests,
    nearest,
    read_manifest,
)
from ecshare.store.objects import ObjectStore, read

MAX_COUNTED = 100_000
MAX_COUNT_S = 20.0
MAX_SHOWN = 20
MAX_CHECKED = 1000  # manifests; a hostile writer can create any number of namespaces
_MAX_SAMPLED_BYTES = 256 * MIB
_KINDS = {Kind.EC: "embeddings", Kind.KV: "KV blocks"}


@dataclass
class NamespaceCount:
    """The counts of one namespace."""

    num_objects: int = 0
    num_bytes: int = 0
    num_foreign: int = 0
    keys: list[Key] = field(default_factory=list)
    """The keys of its first objects."""


async def contents(
    store: ObjectStore, kind: Kind, integrity: Integrity | None, sample: int
) -> AsyncIterator[Finding]:
    """Yield findings about one kind of object. `sample`: how many objects of each namespace to
    verify.
    """
    what = _KINDS[kind]
    manifests = await list_manifests(store, kind)
    counts, num_counted = await count_objects(store, kind_prefix(kind), sample)
    manifests += await _not_listed(store, kind, counts, manifests)
    orphans = await _orphans(store, kind, counts, manifests)
    if not manifests and not any(count.num_objects for count in counts.values()):
        yield Finding(what, Level.NOTE, "no engine that stores any has used this store yet")
    for manifest in manifests:
        space = manifest.namespace
        count, is_more = counts.get(space, NamespaceCount()), False
        if num_counted:
            some, num_of_it = await count_objects(store, namespace_prefix(kind, space), sample)
            count, is_more = some.get(space, NamespaceCount()), num_of_it > 0
        yield _namespace_finding(kind, manifest, count, " or more" if is_more else "")
        if manifest.facts.get("integrity", "") == (integrity.name if integrity else ""):
            yield await _verify_sample(store, kind, space, integrity, count.keys)
        else:
            text = f"{space}: not verified, because it was written with another integrity_key"
            yield Finding(what, Level.NOTE, text)
    for finding in _without_manifest(kind, orphans, num_counted):
        yield finding
    async for finding in _damaged_manifests(store, kind, counts, {*orphans, *_names(manifests)}):
        yield finding
    for finding in _compare(kind, manifests):
        yield finding


def _names(manifests: list[Manifest]) -> set[str]:
    return {manifest.namespace for manifest in manifests}


async def count_objects(
    store: ObjectStore, prefix: str, sample: int, now_s: Callable[[], float] = time.monotonic
) -> tuple[dict[str, NamespaceCount], int]:
    """Count the objects below `prefix` by namespace, within limits of keys and seconds.

    Also return the number of keys at which counting stopped; 0: all were counted. `now_s` is the
    clock.
    """
    counts: dict[str, NamespaceCount] = defaultdict(NamespaceCount)
    num_listed = 0
    ends_s = now_s() + MAX_COUNT_S
    async with aclosing(store.list(prefix)) as found:  # type: ignore[type-var]
        async for info in found:
            if num_listed == MAX_COUNTED or now_s() > ends_s:
                return counts, max(1, num_listed)
            num_listed += 1
            levels = info.key.split("/")
            if len(levels) < 4 or not is_namespace(levels[2]):  # noqa: PLR2004 — see keys.py
                continue
            count = counts[levels[2]]
            if not is_object_key(info.key):
                count.num_foreign += 1
                continue
            count.num_objects += 1
            count.num_bytes += info.num_bytes
            if len(count.keys) < sample:
                count.keys.append(info.key)
    return counts, 0


async def _orphans(
    store: ObjectStore, kind: Kind, counts: Mapping[str, NamespaceCount], manifests: list[Manifest]
) -> dict[str, NamespaceCount]:
    """Return the namespaces that have objects but no manifest, not even a damaged one."""
    unread = _largest(counts, but=_names(manifests))[:MAX_CHECKED]
    stored = await store.exists([manifest_key(kind, name) for name in unread])
    return {name: counts[name] for name, has in zip(unread, stored, strict=True) if not has}


async def _not_listed(
    store: ObjectStore, kind: Kind, counts: Mapping[str, NamespaceCount], manifests: list[Manifest]
) -> list[Manifest]:
    """Read manifests that the listing missed because of foreign keys beside them."""
    found = []
    for name in _largest(counts, but=_names(manifests))[: MOST_READ - len(manifests)]:
        with suppress(ObjectCorrupt):
            facts = await read_manifest(store, kind, name)
            if facts is not None:
                found.append(Manifest(name, facts))
    return found


def _largest(counts: Mapping[str, NamespaceCount], *, but: set[str]) -> list[str]:
    """Return the namespaces with objects, the largest first, without those in `but`."""
    names = [name for name, count in counts.items() if count.num_objects and name not in but]
    return sorted(names, key=lambda name: counts[name].num_objects, reverse=True)


async def _damaged_manifests(
    store: ObjectStore, kind: Kind, counts: Mapping[str, NamespaceCount], known: set[str]
) -> AsyncIterator[Finding]:
    for name in _largest(counts, but=known)[:MAX_SHOWN]:
        try:
            await read_manifest(store, kind, name)  # intact, but beyond the number that is read
        except ObjectCorrupt:
            text = f"namespace {name}: its manifest is damaged; engines that store there replace it"
            yield Finding(_KINDS[kind], Level.NOTE, text)


def _without_manifest(
    kind: Kind, orphans: Mapping[str, NamespaceCount], num_counted: int
) -> Iterator[Finding]:
    what, more = _KINDS[kind], " or more" if num_counted else ""
    for name, count in list(orphans.items())[:MAX_SHOWN]:
        text = (
            f"namespace {name}: {count.num_objects:,}{more} objects without a manifest: it expired "
            "or was removed; engines that run now write it again within hours (look-up buffers "
            "have none)"
        )
        yield Finding(what, Level.NOTE, text)
    if len(orphans) > MAX_SHOWN:
        text = f"{len(orphans) - MAX_SHOWN:,} more namespaces have objects without a manifest"
        yield Finding(what, Level.NOTE, text)
    if num_counted:
        text = f"only the first {num_counted:,} keys were searched for objects without a manifest"
        yield Finding(what, Level.NOTE, text)


def _namespace_finding(kind: Kind, manifest: Manifest, count: NamespaceCount, more: str) -> Finding:
    problem = f"{count.num_foreign} files there are not ecshare's; engines ignore them"
    age = _age(manifest.modified_s)
    facts = manifest.facts
    names = ["model", "dtype", "epoch", "weights"]
    names += [name for name in ("integrity", "tenant", FACT) if facts.get(name)]
    shown = [f"{name} {_word(facts.get(name))}" for name in names]
    return Finding(
        _KINDS[kind],
        Level.OK,
        f"{manifest.namespace}: {count.num_objects:,}{more} objects, "
        f"{readable_size(count.num_bytes)}{more}; its manifest is {age}",
        (
            ", ".join(shown),
            *_layer_sets(facts.get("layer_sets")),
            *([problem] if count.num_foreign else []),
        ),
    )


def _layer_sets(listed: object) -> Iterator[str]:
    """Yield a line about the layers whose KV engines store, as they wrote it (see `LayerSet`)."""
    if isinstance(listed, list):
        sets = [each for each in listed if isinstance(each, list) and len(each) > 1]
        words = [f"{_word(number)} of {_word(kind)}" for kind, number, *_ in sets[:MAX_SHOWN]]
        if words:
            yield f"layers: {', '.join(words)}"


def _age(modified_s: float | None) -> str:
    if modified_s is None:
        return "not listed, because there are invalid keys beside it"
    try:
        return f"of {datetime.fromtimestamp(modified_s, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):
        return "of an invalid time"


def _word(value: object) -> str:
    return ascii(value)[:100]


async def _verify_sample(
    store: ObjectStore, kind: Kind, namespace: str, integrity: Integrity | None, keys: list[Key]
) -> Finding:
    damaged = []
    for key in keys:
        try:
            unseal(await read(store, key, _MAX_SAMPLED_BYTES), key, integrity=integrity)
        except ObjectMissing:
            continue  # expired meanwhile
        except ObjectCorrupt as exc:
            damaged.append(printable(f"{key}: {exc}"))
    text = f"{namespace}: {len(damaged)} of {len(keys)} objects that were read are damaged"
    if damaged:
        text += "; engines encode or compute those again, and replace them"
    return Finding(_KINDS[kind], Level.PROBLEM if damaged else Level.OK, text, tuple(damaged[:5]))


def _compare(kind: Kind, manifests: list[Manifest]) -> Iterator[Finding]:
    """Yield, once for each pair of most similar namespaces, the facts in which they differ."""

    def pair_of(manifest: Manifest) -> tuple[str, ...]:
        other = nearest(manifest.facts, manifests)
        return tuple(sorted((manifest.namespace, other.namespace))) if other else ()

    facts = {manifest.namespace: manifest.facts for manifest in manifests}
    pairs = [pair for pair, _ in groupby(sorted(map(pair_of, manifests))) if pair]
    for one, two in pairs[:MAX_SHOWN]:
        text = f"engines of {one} and of {two} share nothing, because of:"
        lines = differences(facts[one], facts[two])
        more = len(lines) - MAX_SHOWN
        shown = [*lines[:MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        yield Finding(_KINDS[kind], Level.NOTE, text, tuple(shown))
    if len(pairs) > MAX_SHOWN:
        text = f"{len(pairs) - MAX_SHOWN:,} more pairs of namespaces share nothing"
        yield Finding(_KINDS[kind], Level.NOTE, text)
