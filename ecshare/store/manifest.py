# SPDX-License-Identifier: Apache-2.0
"""The facts behind a namespace, stored beside its objects, so that a person can ask why two
engines do not share."""

import json
from collections.abc import Mapping

from ecshare.store.errors import ObjectCorrupt, ObjectMissing
from ecshare.store.keys import JSON, Kind, manifest_key, namespace_digest
from ecshare.store.objects import ObjectStore, read

MAX_BYTES = 1 << 20


async def write_manifest(
    store: ObjectStore, kind: Kind, namespace: str, facts: Mapping[str, JSON]
) -> None:
    """Store `facts`, whose digest is `namespace`, unless they are there.

    Raises ValueError: `namespace` is the digest of other facts.
    """
    if namespace_digest(facts) != namespace:
        raise ValueError(f"namespace {namespace} is not the digest of these facts")
    text = json.dumps(facts, indent=2, sort_keys=True, allow_nan=False)
    await store.put(manifest_key(kind, namespace), text.encode() + b"\n")


async def read_manifest(store: ObjectStore, kind: Kind, namespace: str) -> dict[str, JSON] | None:
    """Return the facts behind `namespace`, or None where nobody has written them.

    Raises ObjectCorrupt: what lies there is too large, is not JSON, or has another digest.
    """
    try:
        body = await read(store, manifest_key(kind, namespace), MAX_BYTES)
    except ObjectMissing:
        return None
    try:
        facts = json.loads(bytes(body))
        if isinstance(facts, dict) and namespace_digest(facts) == namespace:
            return facts
    except (ValueError, RecursionError) as exc:
        raise ObjectCorrupt(f"the manifest of {namespace} is not JSON: {exc}") from exc
    raise ObjectCorrupt(f"the manifest of {namespace} holds the facts of another namespace")


def differences(a: Mapping[str, JSON], b: Mapping[str, JSON]) -> list[str]:
    """One line for each fact that differs, "field: a != b", sorted. Empty: the same namespace."""
    lines = []
    for name in sorted({*a, *b}):
        if name not in a or name not in b:
            left, right = (_shown(facts[name]) if name in facts else "(none)" for facts in (a, b))
            lines.append(f"{name}: {left} != {right}")
        elif isinstance(a[name], Mapping) and isinstance(b[name], Mapping):
            lines += [f"{name}.{line}" for line in differences(a[name], b[name])]
        elif _shown(a[name]) != _shown(b[name]):
            lines.append(f"{name}: {_shown(a[name])} != {_shown(b[name])}")
    return lines


def _shown(value: JSON) -> str:
    return json.dumps(value, sort_keys=True)
