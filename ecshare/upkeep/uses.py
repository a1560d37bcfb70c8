# SPDX-License-Identifier: Apache-2.0
"""Encodes notes of when objects were last used, and the index that a cleaner makes of them.

Both are objects under `USES_PREFIX`, of the format of all others: dtype U32, shape [n, 4], and each
row is one use:

    id, low 32 bits | id, high 32 bits | age in minutes | position

The age counts back from the note's own time of modification, by the store's clock. So the clocks of
engines do not matter, and no use can be in the future. docs/format.md is normative.

Any writer to the store can forge any number of notes. They can only change the order in which a
cleaner removes objects.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from ecshare.store.errors import ObjectCorrupt
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal, unseal
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Key

MOST_USES = 1 << 18
"""The most uses in one object; larger ones are not read."""
USE_BYTES = 16
LIMIT_BYTES = PROLOGUE_BYTES + MOST_USES * USE_BYTES

_WORDS = 4
_OLDEST = np.uint32(0xFFFFFFFF)

Ids = NDArray[np.uint64]
Numbers = NDArray[np.uint32]


class Uses:
    """Uses of objects, as parallel arrays."""

    def __init__(self, ids: Ids, ages: Numbers, positions: Numbers) -> None:
        """Hold `ids` (see `use_id`), `ages` in minutes, and `positions` in chains."""
        self.ids = ids
        self.ages = ages
        self.positions = positions

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, uses: Iterable[tuple[int, int, int]]) -> "Uses":
        """Return uses given as id, age and position."""
        rows = list(uses)
        return cls(
            np.array([row[0] for row in rows], np.uint64),
            np.array([row[1] for row in rows], np.uint32),
            np.array([row[2] for row in rows], np.uint32),
        )

    def cut(self, most: int) -> "Uses":
        """Return the first `most` uses."""
        return Uses(self.ids[:most], self.ages[:most], self.positions[:most])

    def parts(self) -> Iterator["Uses"]:
        """Yield these uses in parts that fit into one object each."""
        for start in range(0, len(self), MOST_USES):
            some = slice(start, start + MOST_USES)
            yield Uses(self.ids[some], self.ages[some], self.positions[some])


def pack(uses: Uses, key: Key, integrity: Integrity | None) -> bytearray:
    """Return the object to store under `key`. At most MOST_USES fit."""
    body = bytearray(PROLOGUE_BYTES + len(uses) * USE_BYTES)
    words = np.frombuffer(body, "<u4", offset=PROLOGUE_BYTES).reshape(-1, _WORDS)
    words[:, 0] = uses.ids & np.uint64(_OLDEST)
    words[:, 1] = uses.ids >> np.uint64(32)
    words[:, 2] = uses.ages
    words[:, 3] = uses.positions
    seal(memoryview(body), TensorSpec("U32", (len(uses), _WORDS), {}), key, integrity)
    return body


def unpack(body: memoryview, key: Key, integrity: Integrity | None) -> Uses:
    """Return the uses in the object that was read under `key`.

    Raises:
        ObjectCorrupt: the object is not a note, is damaged, or has no MAC of our key.
    """
    sealed = unseal(body, key, integrity=integrity)
    shape = sealed.spec.shape
    if sealed.spec.dtype != "U32" or len(shape) != 2 or shape[1] != _WORDS:  # noqa: PLR2004
        raise ObjectCorrupt("corrupt object: it contains no uses")
    words = np.frombuffer(sealed.payload, "<u4").reshape(-1, _WORDS)
    ids = words[:, 0].astype(np.uint64) | words[:, 1].astype(np.uint64) << np.uint64(32)
    return Uses(ids, words[:, 2].astype(np.uint32), words[:, 3].astype(np.uint32))
