# SPDX-License-Identifier: Apache-2.0
"""What both connectors need to store only what is likely to be used again."""

from typing import Any

# For so many sightings at least, and twice as many at most, one is remembered. At 256 tokens per
# chunk these are the prompts of half an hour, on an engine that computes 30,000 tokens per second.
_WINDOW = 1 << 18
_CELLS_A_NAME = 4
# With four cells a name of which a quarter is used at most, one name in 200 is counted too high.
_CELLS_A_SIGHTING = 16
_MOST = 255


class Sightings:
    """Counts how often each name was seen of late, approximately and in fixed memory: 8 MiB.

    A count-min sketch of two generations. A new one begins after `window` sightings, and the older
    one is forgotten. A count may be too high, if other names share all of its cells, and is never
    too low within the window.

    Ownership: one thread.
    """

    def __init__(self, window: int = _WINDOW) -> None:
        """Begin with nothing seen. `window`: the fewest sightings for which one is remembered."""
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
        # Python's own hash of a text or of bytes: 64 bits, and secret unless PYTHONHASHSEED is set.
        first, step = divmod(hash(name) & ((1 << 64) - 1), 1 << 32)
        cells = [(first + n * (step | 1)) % self._num_cells for n in range(_CELLS_A_NAME)]
        count = min(self._new[cell] for cell in cells)
        for cell in cells:
            if self._new[cell] == count < _MOST:
                self._new[cell] += 1
        return count + 1 + min(self._old[cell] for cell in cells)


def requested_save(params: Any, name: str) -> bool | None:
    """Return whether a request itself says that what it computes is stored; None: it says nothing.

    It says so by the field `name` of its transfer params `params`. They come from a client: what is
    not True or False says nothing.
    """
    said = params.get(name) if isinstance(params, dict) else None
    return said if isinstance(said, bool) else None
