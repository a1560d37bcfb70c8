# SPDX-License-Identifier: Apache-2.0
"""Finds the media that have embeddings in a store, by one listing of a namespace.

The name of an object contains its number of rows, which only the model's processor knows. But the
objects of a namespace have few sizes, and so few numbers of rows: each is tried.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from ecshare.store.errors import ConfigError
from ecshare.store.format import PROLOGUE_BYTES
from ecshare.store.keys import Kind, is_object_key, namespace_prefix, object_key, use_id_of
from ecshare.store.manifest import Manifest, list_manifests
from ecshare.store.objects import ObjectStore

_MOST_SIZES = 4096
_ITEM_BYTES = (2, 4)
_MOST_LEVELS = 8
"""The widest embeddings of a model may concatenate so many levels, others fewer."""


class StoredMedia:
    """Holds the media of a namespace that have embeddings, in 8 bytes each."""

    def __init__(self, namespace: str, ids: Sequence[int], rows: Sequence[int]) -> None:
        """`ids`: the `use_id` of each object; `rows`: the numbers of rows that they may have."""
        self._namespace = namespace
        self._ids = np.sort(np.array(ids, np.uint64))
        self._rows = rows

    def __len__(self) -> int:
        return len(self._ids)

    def has(self, uuid: str) -> bool:
        """Return whether the medium that the router names `uuid` has embeddings."""
        names = (f"{rows}::{uuid}" for rows in self._rows)
        keys = (object_key(Kind.EC, self._namespace, name) for name in names)
        asked = np.array([use_id_of(key) for key in keys], np.uint64)
        at = np.searchsorted(self._ids, asked)
        at[at == len(self._ids)] = 0
        return len(self._ids) > 0 and bool((self._ids[at] == asked).any())


async def list_stored(store: ObjectStore, namespace: str, width: object) -> StoredMedia:
    """Return the media of a namespace. `width`: the `encoder_width` of its facts.

    Raises:
        StoreError: the store failed.
    """
    ids, sizes = array("Q"), set[int]()
    async for info in store.list(namespace_prefix(Kind.EC, namespace)):
        if is_object_key(info.key) and not info.key.endswith(".gap"):
            ids.append(use_id_of(info.key))
            if len(sizes) < _MOST_SIZES:
                sizes.add(info.num_bytes - PROLOGUE_BYTES)
    widest = width if type(width) is int and width > 0 else 0
    rows = {
        size * levels // (widest * item_bytes)
        for size in sizes
        for levels in range(1, _MOST_LEVELS + 1)
        for item_bytes in _ITEM_BYTES
        if widest and size > 0 and size * levels % (widest * item_bytes) == 0
    }
    return StoredMedia(namespace, ids, sorted(rows)[:_MOST_SIZES])


async def find_namespace(store: ObjectStore, model: str, namespace: str) -> Manifest | None:
    """Return the manifest of the namespace with the embeddings of `model`; None: there is none yet.

    `namespace`: the one to choose, or "".

    Raises:
        ConfigError: `namespace` does not exist, or there are several.
        StoreError: the store failed.
    """
    found = await list_manifests(store, Kind.EC)
    if namespace:
        named = [each for each in found if each.namespace == namespace]
        if not named:
            raise ConfigError(f"--namespace: the store has no embeddings of {namespace!r}")
        return named[0]
    of_model = [each for each in found if model and each.facts.get("model") == model] or found
    if len(of_model) > 1:
        names = ", ".join(each.namespace for each in of_model[:8])
        raise ConfigError(
            f"--store: it has several namespaces of embeddings ({names}); say --namespace, which "
            "the encode engine's log names at start"
        )
    return of_model[0] if of_model else None
