# SPDX-License-Identifier: Apache-2.0
"""Stores for tests of the cleaner: objects of any age, and notes of their use."""

import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ecshare.store.config import StoreConfig
from ecshare.store.errors import StoreBusy
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.integrity import Integrity
from ecshare.store.keys import (
    Key,
    Kind,
    manifest_key,
    namespace_digest,
    new_uses_key,
    object_key,
    use_id_of,
)
from ecshare.store.objects import Buffer, ObjectStore
from ecshare.store.open import open_store
from ecshare.upkeep.record import Name, UseRecord
from ecshare.upkeep.uses import Uses, pack

NAMESPACE = "00112233445566778899aabbccddeeff"
OTHER = "ffeeddccbbaa99887766554433221100"


def kv(name: str, part: str = "t0of1", namespace: str = NAMESPACE) -> Key:
    return object_key(Kind.KV, namespace, name.encode(), part)


def ec(name: str, namespace: str = NAMESPACE) -> Key:
    return object_key(Kind.EC, namespace, name)


def opened(root: Path) -> ObjectStore:
    return open_store(StoreConfig(url=str(root)), "options")


def put(root: Path, key: str, hours: float, num_bytes: int = 100) -> None:
    """Write a file of the store that was modified `hours` ago."""
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(num_bytes))
    age(path, hours)


def age(path: Path, hours: float) -> None:
    then_s = time.time() - hours * 3600
    os.utime(path, (then_s, then_s))


def note(
    root: Path,
    uses: Iterable[tuple[Key, float, int]],
    hours: float = 0.0,
    integrity: Integrity | None = None,
) -> Key:
    """Write a note, `hours` ago. `uses`: key, hours before the note, and position."""
    rows = list(uses)
    key = new_uses_key(Kind(rows[0][0][:2]))
    own = Uses.of((use_id_of(each), round(ago * 60), position) for each, ago, position in rows)
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack(own, key, integrity))
    age(path, hours)
    return key


def space(root: Path, kind: Kind, **facts: Any) -> str:
    """Write the manifest of a namespace with these facts; return its digest."""
    digest = namespace_digest(facts)
    path = root / manifest_key(kind, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts))
    return digest


def taken(record: UseRecord) -> list[tuple[Name, int, int]]:
    """Take all uses, in the order of their first addition."""
    return [use for some in record.take() for use in some][::-1]


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def kept(root: Path) -> set[str]:
    """Return the files, without those of `upkeep/`."""
    return {name for name in files(root) if not name.startswith("upkeep/")}


class Full(DirectoryStore):
    """A folder on a disk without room, until something is removed."""

    is_full = True

    async def put(self, key: Key, body: Buffer, *, replace: bool = False) -> bool:
        if self.is_full:
            raise StoreBusy("no space left on device")
        return await super().put(key, body, replace=replace)

    async def delete(self, keys: Sequence[Key]) -> None:
        await super().delete(keys)
        self.is_full = False
