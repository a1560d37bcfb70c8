# SPDX-License-Identifier: Apache-2.0
"""The facts of a namespace, stored beside its objects, so that users can see why two engines do not
share."""

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
from ecshare.store.objects import Buffer, ObjectInfo, ObjectStore, read

MAX_BYTES = 1 << 16
# Any writer to the store may add manifests of any number and content.
_MOST_SEEN = 100_000
_MOST_LISTED = 10_000
MOST_READ = 64
_MOST_NAMES = 500
_MOST_LEVELS = 16
_LONGEST_VALUE = 200


@dataclass(frozen=True)
class Manifest:
    """A namespace and its facts, as read from the store."""

    namespace: str
    facts: Mapping[str, JSON]
    modified_s: float | None = None
    """Seconds since the epoch: when an engine of that namespace last started or renewed it."""

    @cached_property
    def flat(self) -> dict[str, str]:
        """Return the facts as one flat dictionary, which is fast to compare."""
        return _flat(self.facts)


async def write_manifest(
    store: ObjectStore, kind: Kind, namespace: str, facts: Mapping[str, JSON]
) -> None:
    """Store `facts`, whose digest is `namespace`. An existing manifest is replaced.

    So its age restarts, and no expiry rule removes it. A damaged manifest is repaired.

    Raises:
        ValueError: `namespace` is the digest of other facts.
        StoreUnavailable: they are not in the store and cannot be stored.
    """
    if namespace_digest(facts) != namespace:
        raise ValueError(f"namespace {namespace} is not the digest of these facts")
    text = json.dumps(facts, indent=2, sort_keys=True, allow_nan=False)
    await _write_anew(store, manifest_key(kind, namespace), text.encode() + b"\n")


async def write_mark(store: ObjectStore, key: Key) -> None:
    """Store a few bytes under `key`; only their existence matters. An existing mark is replaced.

    Raises:
        StoreUnavailable: it is not in the store and cannot be stored.
    """
    await _write_anew(store, key, b"ecshare")


async def _write_anew(store: ObjectStore, key: Key, body: bytes) -> None:
    """Replace the object. If the store refuses to replace objects, check that it has `body`."""
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
    """Return the facts of `namespace`; None if no engine has written them.

    Raises:
        ObjectCorrupt: the manifest is too large, is not JSON, has too many names or levels, or has
            another digest.
        StoreUnavailable: the store failed.
    """
    try:
        body = await read(store, manifest_key(kind, namespace), MAX_BYTES)
    except ObjectMissing:
        return None
    return parse_manifest(body, namespace)


def parse_manifest(body: Buffer, namespace: str) -> dict[str, JSON]:
    """Return the facts of `namespace` that `body` contains.

    Raises:
        ObjectCorrupt: see `read_manifest`.
    """
    try:
        facts = json.loads(bytes(body))
        if isinstance(facts, dict) and _is_modest(facts) and namespace_digest(facts) == namespace:
            return facts
    except (ValueError, RecursionError) as exc:
        raise ObjectCorrupt(f"the manifest of {namespace} is not JSON: {exc}") from exc
    raise ObjectCorrupt(f"the manifest of {namespace} contains other facts, or too many")


async def list_manifests(store: ObjectStore, kind: Kind) -> list[Manifest]:
    """Return the manifests of a kind, newest first, at most 64.

    Damaged manifests, and objects that are none, are left out.

    Raises:
        StoreUnavailable: the store failed.
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
    """Return which of `others` differs from `facts` in the fewest fields, but in at least one.

    A connector and a tier for vLLM's own offloading never share, so they are not compared.
    """
    ours = _flat(facts).items()
    alike = [manifest for manifest in others if ("tier" in manifest.facts) == ("tier" in facts)]
    # Count the names of the facts that only one of them has, or that differ.
    counted = [(len(dict(ours ^ manifest.flat.items())), manifest) for manifest in alike]
    differing = [each for each in counted if each[0]]
    return min(differing, key=lambda each: each[0])[1] if differing else None


def differences(a: Mapping[str, JSON], b: Mapping[str, JSON]) -> list[str]:
    """Return one line "field: a != b" for each different fact, sorted. Empty: same namespace."""
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
    """Return each fact that is not an object: its value as text, by its path of names."""
    found: dict[str, str] = {}
    for name, value in facts.items():
        path = f"{above}{_text(name)}."
        if isinstance(value, Mapping) and value:
            found |= _flat(value, path)
        else:
            found[path] = _text(value)
    return found


def _is_modest(facts: JSON) -> bool:
    """Return whether the facts have so few names and levels that comparing them is cheap."""
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
    """Return `value` for a log, shortened: any writer to the store may have chosen it."""
    text = _text(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _plain(name: str) -> str:
    return _shown(name)[1:-1]
