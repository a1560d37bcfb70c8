# SPDX-License-Identifier: Apache-2.0
"""The facts behind a namespace, stored beside its objects, so that a person can ask why two
engines do not share."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import cached_property

from ecshare.store.errors import ObjectCorrupt, ObjectMissing, StoreError
from ecshare.store.keys import (
    JSON,
    Key,
    Kind,
    is_namespace,
    manifest_key,
    manifests_prefix,
    namespace_digest,
)
from ecshare.store.objects import ObjectInfo, ObjectStore, read

MAX_BYTES = 1 << 16
# Whoever may write to the store decides how many there are, and what they hold.
_MOST_SEEN = 100_000
_MOST_LISTED = 10_000
MOST_READ = 64
_MOST_NAMES = 500
_MOST_LEVELS = 16
_LONGEST_VALUE = 200


@dataclass(frozen=True)
class Manifest:
    """What a store says of one namespace."""

    namespace: str
    facts: Mapping[str, JSON]
    modified_s: float | None = None
    """Seconds since the epoch: when an engine of that namespace last started or renewed it."""

    @cached_property
    def flat(self) -> dict[str, str]:
        """The facts without levels, to compare them often."""
        return _flat(self.facts)


async def write_manifest(
    store: ObjectStore, kind: Kind, namespace: str, facts: Mapping[str, JSON]
) -> None:
    """Store `facts`, whose digest is `namespace`, anew: a manifest that is there gets young again,
    so that no rule on the age of objects removes it, and a damaged one is replaced.

    Raises ValueError: `namespace` is the digest of other facts.
    Raises StoreUnavailable, StoreDenied: they are not in the store and cannot be put there.
    """
    if namespace_digest(facts) != namespace:
        raise ValueError(f"namespace {namespace} is not the digest of these facts")
    text = json.dumps(facts, indent=2, sort_keys=True, allow_nan=False)
    await _write_anew(store, manifest_key(kind, namespace), text.encode() + b"\n")


async def write_mark(store: ObjectStore, key: Key) -> None:
    """Store a few bytes under `key`, anew as a manifest: that the object is there says all.

    Raises StoreUnavailable, StoreDenied: it is not in the store and cannot be put there.
    """
    await _write_anew(store, key, b"ecshare")


async def _write_anew(store: ObjectStore, key: Key, body: bytes) -> None:
    """Replace the object; where the store lets nobody replace one, see that it is there."""
    try:
        await store.put(key, body, replace=True)
    except StoreError:
        if not await store.put(key, body) and await _found(store, key) != body:
            raise


async def _found(store: ObjectStore, key: Key) -> bytes:
    try:
        return bytes(await read(store, key, MAX_BYTES))
    except (ObjectMissing, ObjectCorrupt):
        return b""


async def read_manifest(store: ObjectStore, kind: Kind, namespace: str) -> dict[str, JSON] | None:
    """Return the facts behind `namespace`, or None where nobody has written them.

    Raises ObjectCorrupt: what lies there is too large, is not JSON, has too many names or levels,
    or has another digest.
    """
    try:
        body = await read(store, manifest_key(kind, namespace), MAX_BYTES)
    except ObjectMissing:
        return None
    try:
        facts = json.loads(bytes(body))
        if isinstance(facts, dict) and _is_modest(facts) and namespace_digest(facts) == namespace:
            return facts
    except (ValueError, RecursionError) as exc:
        raise ObjectCorrupt(f"the manifest of {namespace} is not JSON: {exc}") from exc
    raise ObjectCorrupt(f"the manifest of {namespace} holds other facts, or more than are compared")


async def list_manifests(store: ObjectStore, kind: Kind) -> list[Manifest]:
    """Return the manifests of a kind, the youngest first: of very many, the youngest 64.

    What is no manifest, and damaged ones, are left out.
    """
    prefix = manifests_prefix(kind)
    listed: list[ObjectInfo] = []
    async with aclosing(store.list(prefix)) as found:  # type: ignore[type-var]
        num_seen = 0
        async for info in found:
            num_seen += 1
            if is_namespace(info.key.removeprefix(prefix)) and info.num_bytes <= MAX_BYTES:
                listed.append(info)
            if len(listed) == _MOST_LISTED or num_seen == _MOST_SEEN:
                break
    listed.sort(key=lambda info: info.modified_s, reverse=True)

    async def one(info: ObjectInfo) -> Manifest | None:
        namespace = info.key.removeprefix(prefix)
        with suppress(ObjectCorrupt):
            if (facts := await read_manifest(store, kind, namespace)) is not None:
                return Manifest(namespace, facts, info.modified_s)
        return None

    manifests = await asyncio.gather(*map(one, listed[:MOST_READ]))
    return [manifest for manifest in manifests if manifest]


def nearest(facts: Mapping[str, JSON], others: list[Manifest]) -> Manifest | None:
    """Return which of `others` differs from `facts` in the fewest fields, but in some.

    A connector and a tier for vLLM's own offloading never share, so neither is near the other.
    """
    ours = _flat(facts).items()
    alike = [manifest for manifest in others if ("tier" in manifest.facts) == ("tier" in facts)]
    # By the names of what only one of them has, or has otherwise.
    counted = [(len(dict(ours ^ manifest.flat.items())), manifest) for manifest in alike]
    differing = [each for each in counted if each[0]]
    return min(differing, key=lambda each: each[0])[1] if differing else None


def differences(a: Mapping[str, JSON], b: Mapping[str, JSON]) -> list[str]:
    """One line for each fact that differs, "field: a != b", sorted. Empty: the same namespace."""
    lines = []
    for name in sorted({*a, *b}):
        if name not in a or name not in b:
            left, right = (_shown(facts[name]) if name in facts else "(none)" for facts in (a, b))
            lines.append(f"{_plain(name)}: {left} != {right}")
        elif isinstance(a[name], Mapping) and isinstance(b[name], Mapping):
            lines += [f"{_plain(name)}.{line}" for line in differences(a[name], b[name])]
        elif _text(a[name]) != _text(b[name]):
            lines.append(f"{_plain(name)}: {_shown(a[name])} != {_shown(b[name])}")
    return lines


def _flat(facts: Mapping[str, JSON], above: str = "") -> dict[str, str]:
    """One entry for each fact that is no object: its value as text, by the names before it."""
    found: dict[str, str] = {}
    for name, value in facts.items():
        path = f"{above}{_text(name)}."
        if isinstance(value, Mapping) and value:
            found |= _flat(value, path)
        else:
            found[path] = _text(value)
    return found


def _is_modest(facts: JSON) -> bool:
    """Whether they have few names and levels: to compare them takes little time and stack."""
    level, num_names = [facts], 0
    for _ in range(_MOST_LEVELS):
        objects = [each for each in level if isinstance(each, dict)]
        num_names += sum(map(len, objects))
        level = [inner for each in objects for inner in each.values()] + [
            inner for each in level if isinstance(each, list) for inner in each
        ]
    return not level and num_names <= _MOST_NAMES


def _text(value: JSON) -> str:
    return json.dumps(value, sort_keys=True)


def _shown(value: JSON) -> str:
    """For a log: facts come from the store, whoever wrote them."""
    text = _text(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _plain(name: str) -> str:
    return _shown(name)[1:-1]
