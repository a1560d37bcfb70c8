# SPDX-License-Identifier: Apache-2.0
"""What lies in a store: who has stored how much, is it sound, and what keeps engines apart."""

from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby

from ecshare.doctor.findings import Finding, Level, printable
from ecshare.store.config import MIB
from ecshare.store.errors import ObjectCorrupt, ObjectMissing
from ecshare.store.format import unseal
from ecshare.store.integrity import Integrity
from ecshare.store.keys import (
    Kind,
    is_namespace,
    is_object_key,
    kind_prefix,
    manifest_key,
    namespace_prefix,
)
from ecshare.store.manifest import Manifest, differences, list_manifests, nearest, read_manifest
from ecshare.store.objects import ObjectStore, read

_MOST_COUNTED = 100_000
_MOST_NAMED = 20
_MOST_ASKED = 1000  # manifests; whoever may write there can invent as many namespaces as they like
_LARGEST_SAMPLED = 256 * MIB
_KINDS = {Kind.EC: "embeddings", Kind.KV: "KV blocks"}


@dataclass
class _Count:
    """What was found of one namespace."""

    num_objects: int = 0
    num_bytes: int = 0
    num_odd: int = 0
    keys: list[str] = field(default_factory=list)
    """Of its first objects."""


async def contents(
    store: ObjectStore, kind: Kind, integrity: Integrity | None, sample: int
) -> AsyncIterator[Finding]:
    """Yield what is found of a kind. `sample`: how many objects of each namespace to verify."""
    what = _KINDS[kind]
    manifests = await list_manifests(store, kind)
    counts, is_all = await _count(store, kind_prefix(kind), sample)
    orphans = await _orphans(store, kind, counts, manifests)
    if not manifests and not any(count.num_objects for count in counts.values()):
        yield Finding(what, Level.NOTE, "no engine that stores any has used this store yet")
    for manifest in manifests:
        space = manifest.namespace
        count, is_whole = counts.get(space, _Count()), is_all
        if not is_all:
            some, is_whole = await _count(store, namespace_prefix(kind, space), sample)
            count = some.get(space, _Count())
        yield _held(kind, manifest, count, "" if is_whole else " or more")
        if manifest.facts.get("integrity", "") == (integrity.fingerprint if integrity else ""):
            yield await _sampled(store, kind, space, integrity, count.keys)
        else:
            text = f"{space}: not sampled, it was written with another integrity_key"
            yield Finding(what, Level.NOTE, text)
    for finding in _without_manifest(kind, orphans, is_all):
        yield finding
    async for finding in _damaged(store, kind, counts, {*orphans, *_names(manifests)}):
        yield finding
    for finding in _compared(kind, manifests):
        yield finding


def _names(manifests: list[Manifest]) -> set[str]:
    return {manifest.namespace for manifest in manifests}


async def _count(store: ObjectStore, prefix: str, sample: int) -> tuple[dict[str, _Count], bool]:
    """Count by namespace what lies below `prefix`, and say whether that is all there is."""
    counts: dict[str, _Count] = defaultdict(_Count)
    num_listed = 0
    async with aclosing(store.list(prefix)) as found:  # type: ignore[type-var]
        async for info in found:
            num_listed += 1
            if num_listed > _MOST_COUNTED:
                return counts, False
            levels = info.key.split("/")
            if len(levels) < 4 or not is_namespace(levels[2]):  # noqa: PLR2004 — see keys.py
                continue
            count = counts[levels[2]]
            if not is_object_key(info.key):
                count.num_odd += 1
                continue
            count.num_objects += 1
            count.num_bytes += info.num_bytes
            if len(count.keys) < sample:
                count.keys.append(info.key)
    return counts, True


async def _orphans(
    store: ObjectStore, kind: Kind, counts: Mapping[str, _Count], manifests: list[Manifest]
) -> dict[str, _Count]:
    """Return the namespaces that have objects, and no manifest: not even a damaged one."""
    doubtful = _largest(counts, but=_names(manifests))[:_MOST_ASKED]
    there = await store.exists([manifest_key(kind, name) for name in doubtful])
    return {name: counts[name] for name, has in zip(doubtful, there, strict=True) if not has}


def _largest(counts: Mapping[str, _Count], *, but: set[str]) -> list[str]:
    """Return the namespaces with objects, the largest first, without some."""
    names = [name for name, count in counts.items() if count.num_objects and name not in but]
    return sorted(names, key=lambda name: counts[name].num_objects, reverse=True)


async def _damaged(
    store: ObjectStore, kind: Kind, counts: Mapping[str, _Count], known: set[str]
) -> AsyncIterator[Finding]:
    for name in _largest(counts, but=known)[:_MOST_NAMED]:
        try:
            await read_manifest(store, kind, name)  # whole: one of too many to be shown
        except ObjectCorrupt:
            text = f"namespace {name}: its manifest is damaged; engines that store there replace it"
            yield Finding(_KINDS[kind], Level.NOTE, text)


def _without_manifest(kind: Kind, orphans: Mapping[str, _Count], is_all: bool) -> Iterator[Finding]:
    what, more = _KINDS[kind], "" if is_all else " or more"
    for name, count in list(orphans.items())[:_MOST_NAMED]:
        text = (
            f"namespace {name}: {count.num_objects:,}{more} objects without a manifest: it expired "
            "or was removed; engines that run now write it again within hours (look-up buffers "
            "have none)"
        )
        yield Finding(what, Level.NOTE, text)
    if len(orphans) > _MOST_NAMED:
        text = f"{len(orphans) - _MOST_NAMED:,} more namespaces have objects without a manifest"
        yield Finding(what, Level.NOTE, text)
    if not is_all:
        text = f"only the first {_MOST_COUNTED:,} keys were searched for objects without a manifest"
        yield Finding(what, Level.NOTE, text)


def _held(kind: Kind, manifest: Manifest, count: _Count, more: str) -> Finding:
    odd = f"{count.num_odd} files there are none of ours; engines ignore them"
    renewed = datetime.fromtimestamp(manifest.modified_s, UTC)
    facts = manifest.facts
    shown = [f"{name} {_word(facts.get(name))}" for name in ("model", "dtype", "epoch", "weights")]
    return Finding(
        _KINDS[kind],
        Level.OK,
        f"{manifest.namespace}: {count.num_objects:,}{more} objects, "
        f"{size(count.num_bytes)}{more}; its manifest is of {renewed:%Y-%m-%d %H:%M} UTC",
        (", ".join(shown), *([odd] if count.num_odd else [])),
    )


def size(num_bytes: int) -> str:
    """Return `num_bytes` for a person."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


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
            damaged.append(printable(f"{key}: {exc}"))
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
