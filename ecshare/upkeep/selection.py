# SPDX-License-Identifier: Apache-2.0
"""Chooses namespaces by what a person knows of them: the model, the tenant, or the digest.

All but the digest is in the manifest. A manifest has the digest of its namespace, so no writer to
the store can give a namespace to another model or tenant. It may be lost, though.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Mapping

from msgspec import Struct

from ecshare.store.epochs import FACT
from ecshare.store.errors import ObjectCorrupt
from ecshare.store.keys import JSON, Kind, is_namespace, manifests_prefix
from ecshare.store.manifest import read_manifest
from ecshare.upkeep.calls import Calls, batched

# Any writer to the store may add manifests of any number.
MOST_NAMESPACES = 100_000
_READS = 16
# Longer than any name of a model; nor may a fact fill the memory.
_LONGEST_CHARS = 1000


class Namespace(Struct, frozen=True):
    """A namespace of one kind, and what its manifest says. All texts may be hostile."""

    kind: Kind
    digest: str
    model: str = ""
    tenant: str = ""
    dtype: str = ""
    epoch: str = ""
    integrity: str = ""
    """What stands for the integrity key."""
    updates: str = ""
    """The number of the epoch, if it is not 0."""

    @classmethod
    def of(cls, kind: Kind, digest: str, facts: Mapping[str, JSON]) -> "Namespace":
        """Return the namespace of these facts."""
        names = ("model", "tenant", "dtype", "epoch", "integrity", FACT)
        return cls(kind, digest, *(_cut(str(facts.get(name) or "")) for name in names))


class Selection(Struct, frozen=True):
    """Namespaces that have one of the values of each field; an empty field has all values."""

    kinds: tuple[Kind, ...] = tuple(Kind)
    digests: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    tenants: frozenset[str] = frozenset()
    integrities: frozenset[str] = frozenset()

    @property
    def is_empty(self) -> bool:
        """Return whether it names nothing but kinds."""
        return not (self.digests or self.models or self.tenants)

    @property
    def needs_facts(self) -> bool:
        """Return whether a namespace without a manifest may or may not be chosen."""
        return bool(self.models or self.tenants or self.integrities)

    def has(self, namespace: Namespace) -> bool:
        """Return whether `namespace` is chosen."""
        return (
            namespace.kind in self.kinds
            and (not self.digests or namespace.digest in self.digests)
            and (not self.models or namespace.model in map(_cut, self.models))
            and (not self.tenants or namespace.tenant in map(_cut, self.tenants))
            and (not self.integrities or namespace.integrity in self.integrities)
        )


def _cut(text: str) -> str:
    """Return `text`; of one that is too long its beginning and its digest."""
    if len(text) <= _LONGEST_CHARS:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[: _LONGEST_CHARS - len(digest)]}{digest}"


async def read_namespaces(calls: Calls, selection: Selection) -> AsyncIterator[Namespace]:
    """Yield the namespaces whose manifests can be read, of which the first 100,000 of a kind are.

    If the selection has digests, only these are looked for.

    Raises:
        StoreError: the store failed.
    """
    for kind in selection.kinds:
        if selection.digests:
            async for found in read_all(calls, kind, sorted(selection.digests)):
                yield found
            continue
        prefix, num_seen = manifests_prefix(kind), 0
        async for page in calls.pages(calls.store.list(prefix)):
            digests = (info.key.removeprefix(prefix) for info in page)
            async for found in read_all(calls, kind, filter(is_namespace, digests)):
                yield found
            num_seen += len(page)
            if num_seen >= MOST_NAMESPACES:
                break


async def read_all(calls: Calls, kind: Kind, digests: Iterable[str]) -> AsyncIterator[Namespace]:
    """Yield those of these namespaces whose manifests can be read.

    Raises:
        StoreError: the store failed.
    """
    for some in batched(digests, _READS):
        for found in await asyncio.gather(*(read_namespace(calls, kind, each) for each in some)):
            if found is not None:
                yield found


async def read_namespace(calls: Calls, kind: Kind, digest: str) -> Namespace | None:
    """Return the namespace; None: it has no manifest that can be read.

    Raises:
        StoreError: the store failed.
    """
    try:
        facts = await calls.steady(lambda: read_manifest(calls.store, kind, digest))
    except ObjectCorrupt:
        return None
    return None if facts is None else Namespace.of(kind, digest, facts)
