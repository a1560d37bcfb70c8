# SPDX-License-Identifier: Apache-2.0
"""Counts how often items and chunks were requested, so that only repeated ones are stored."""

from typing import Any

# A sighting counts during at least this many later sightings, and at most twice as many. At 256
# tokens per chunk, an engine that computes 30,000 tokens per second sees as many in half an hour.
_WINDOW = 1 << 18
_CELLS_A_NAME = 4
# Four cells a name, and at most a quarter of all cells in use: one name in 200 is counted too high.
_CELLS_A_SIGHTING = 16
_MOST = 255


class Sightings:
    """Counts how often each name was seen recently, approximately and in fixed memory: 8 MiB.

    A count-min sketch of two generations. A new one begins after `window` sightings, and the older
    one is dropped. A count may be too high, if other names share all of its cells, and is never too
    low within the window.

    Ownership: one thread.
    """

    def __init__(self, window: int = _WINDOW) -> None:
        """Begin with no sightings. `window`: a sighting counts during at least so many others."""
        self._window = window
        self._num_cells = window * _CELLS_A_SIGHTING
        self._new, self._old = bytearray(self._num_cells), bytearray(self._num_cells)
        self._num_new = 0

    def add(self, name: bytes | str) -> int:
        """Count a sighting of `name`; return how many there were, with this one. O(1)."""
        if self._num_new == self._window:
            self._new, self._old = bytearray(self._num_cells), self._new
            self._num_new = 0
        self._num_new += 1
        # Python's own hash has 64 bits, and its seed is secret unless PYTHONHASHSEED is set.
        first, step = divmod(hash(name) & ((1 << 64) - 1), 1 << 32)
        cells = [(first + n * (step | 1)) % self._num_cells for n in range(_CELLS_A_NAME)]
        count = min(self._new[cell] for cell in cells)
        for cell in cells:
            if self._new[cell] == count < _MOST:
                self._new[cell] += 1
        return count + 1 + min(self._old[cell] for cell in cells)


def requested_save(params: Any, name: str) -> bool | None:
    """Return the field `name` of a request's transfer params: may its results be stored or not.

    None: the field is missing, or is not a boolean. Clients can send any value.
    """
    value = params.get(name) if isinstance(params, dict) else None
    return value if isinstance(value, bool) else None
