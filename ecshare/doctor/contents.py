# SPDX-License-Identifier: Apache-2.0
"""What lies in a store: who has stored how much, is it sound, and what keeps engines apart."""

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, suppress
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
from ecshare.store.manifest import (
    MOST_READ,
    Manifest,
    differences,
    list_manifests,
    nearest,
    read_manifest,
)
from ecshare.store.objects import ObjectStore, read

_MOST_COUNTED = 100_000
_LONGEST_COUNT_S = 20.0
_MOST_NAMED = 20
_MOST_ASKED = 1000  # manifests; whoever may write there can invent as many namespaces as they like
_LARGEST_SAMPLED = 256 * MIB
_KINDS = {Kind.EC: "embeddings", Kind.KV: "KV blocks"}


@dataclass
class Count:
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
    counts, num_counted = await tally(store, kind_prefix(kind), sample)
    manifests += await _not_listed(store, kind, counts, manifests)
    orphans = await _orphans(store, kind, counts, manifests)
    if not manifests and not any(count.num_objects for count in counts.values()):
        yield Finding(what, Level.NOTE, "no engine that stores any has used this store yet")
    for manifest in manifests:
        space = manifest.namespace
        held, is_more = counts.get(space, Count()), False
        if num_counted:
            some, num_of_it = await tally(store, namespace_prefix(kind, space), sample)
            held, is_more = some.get(space, Count()), num_of_it > 0
        yield _held(kind, manifest, held, " or more" if is_more else "")
        if manifest.facts.get("integrity", "") == (integrity.fingerprint if integrity else ""):
            yield await _sampled(store, kind, space, integrity, held.keys)
        else:
            text = f"{space}: not sampled, it was written with another integrity_key"
            yield Finding(what, Level.NOTE, text)
    for finding in _without_manifest(kind, orphans, num_counted):
        yield finding
    async for finding in _damaged(store, kind, counts, {*orphans, *_names(manifests)}):
        yield finding
    for finding in _compared(kind, manifests):
        yield finding


def _names(manifests: list[Manifest]) -> set[str]:
    return {manifest.namespace for manifest in manifests}


async def tally(
    store: ObjectStore, prefix: str, sample: int, now_s: Callable[[], float] = time.monotonic
) -> tuple[dict[str, Count], int]:
    """Count by namespace what lies below `prefix`, until very many keys or seconds have passed.

    Returns also after how many keys it stopped; 0: that is all there is. `now_s`: the clock.
    """
    counts: dict[str, Count] = defaultdict(Count)
    num_listed = 0
    ends_s = now_s() + _LONGEST_COUNT_S
    async with aclosing(store.list(prefix)) as found:  # type: ignore[type-var]
        async for info in found:
            if num_listed == _MOST_COUNTED or now_s() > ends_s:
                return counts, max(1, num_listed)
            num_listed += 1
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
    return counts, 0


async def _orphans(
    store: ObjectStore, kind: Kind, counts: Mapping[str, Count], manifests: list[Manifest]
) -> dict[str, Count]:
    """Return the namespaces that have objects, and no manifest: not even a damaged one."""
    doubtful = _largest(counts, but=_names(manifests))[:_MOST_ASKED]
    there = await store.exists([manifest_key(kind, name) for name in doubtful])
    return {name: counts[name] for name, has in zip(doubtful, there, strict=True) if not has}


async def _not_listed(
    store: ObjectStore, kind: Kind, counts: Mapping[str, Count], manifests: list[Manifest]
) -> list[Manifest]:
    """Read what no listing told, because of odd keys beside it: it is asked for by its name."""
    found = []
    for name in _largest(counts, but=_names(manifests))[: MOST_READ - len(manifests)]:
        with suppress(ObjectCorrupt):
            facts = await read_manifest(store, kind, name)
            if facts is not None:
                found.append(Manifest(name, facts))
    return found


def _largest(counts: Mapping[str, Count], *, but: set[str]) -> list[str]:
    """Return the namespaces with objects, the largest first, without some."""
    names = [name for name, count in counts.items() if count.num_objects and name not in but]
    return sorted(names, key=lambda name: counts[name].num_objects, reverse=True)


async def _damaged(
    store: ObjectStore, kind: Kind, counts: Mapping[str, Count], known: set[str]
) -> AsyncIterator[Finding]:
    for name in _largest(counts, but=known)[:_MOST_NAMED]:
        try:
            await read_manifest(store, kind, name)  # whole: one of too many to be shown
        except ObjectCorrupt:
            text = f"namespace {name}: its manifest is damaged; engines that store there replace it"
            yield Finding(_KINDS[kind], Level.NOTE, text)


def _without_manifest(
    kind: Kind, orphans: Mapping[str, Count], num_counted: int
) -> Iterator[Finding]:
    what, more = _KINDS[kind], " or more" if num_counted else ""
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
    if num_counted:
        text = f"only the first {num_counted:,} keys were searched for objects without a manifest"
        yield Finding(what, Level.NOTE, text)


def _held(kind: Kind, manifest: Manifest, count: Count, more: str) -> Finding:
    odd = f"{count.num_odd} files there are none of ours; engines ignore them"
    age = _age(manifest.modified_s)
    facts = manifest.facts
    shown = [f"{name} {_word(facts.get(name))}" for name in ("model", "dtype", "epoch", "weights")]
    return Finding(
        _KINDS[kind],
        Level.OK,
        f"{manifest.namespace}: {count.num_objects:,}{more} objects, "
        f"{size(count.num_bytes)}{more}; its manifest is {age}",
        (", ".join(shown), *([odd] if count.num_odd else [])),
    )


def _age(modified_s: float | None) -> str:
    if modified_s is None:
        return "not listed, as odd keys lie beside it"
    try:
        return f"of {datetime.fromtimestamp(modified_s, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):
        return "of a time that cannot be"


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
    pairs = [pair for pair, _ in groupby(sorted(map(said, manifests))) if pair]
    for one, two in pairs[:_MOST_NAMED]:
        text = f"engines of {one} and of {two} share nothing, because of:"
        lines = differences(facts[one], facts[two])
        more = len(lines) - _MOST_NAMED
        shown = [*lines[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]
        yield Finding(_KINDS[kind], Level.NOTE, text, tuple(shown))
    if len(pairs) > _MOST_NAMED:
        text = f"{len(pairs) - _MOST_NAMED:,} more pairs of namespaces share nothing"
        yield Finding(_KINDS[kind], Level.NOTE, text)
