# SPDX-License-Identifier: Apache-2.0
"""Adapts the number of operations in flight to the measured throughput of a store. No I/O."""

import math

# Each measurement changes the factor by one step. The steps are smaller after the first reversal.
_FIRST_STEP = 2.0
_STEP = 1.25
# A smaller loss is not distinguished from the spread of measurements.
_NOISE = 0.05
_FEWEST_MEASURED = 6


class Window:
    """A factor between 1 and `most` that multiplies the limits of the operations in flight.

    The factor moves up or down, and reverses when throughput / sqrt(number in flight) falls. So it
    grows while 50 % more in flight give at least about 22 % more throughput, and shrinks otherwise.
    An operation that fails or is slow halves it.

    Throughput is computed as the number in flight times the bytes per second of one operation.
    Only operations that began after the last move count, and only if others wait for room at their
    end: a store that gets few requests does not show how many it could serve.

    Ownership: the I/O thread.
    """

    def __init__(self, most: float, slow_s: float) -> None:
        """`slow_s`: an operation that takes longer than this is slow."""
        self.factor = 1.0
        self.moves = 0
        """The number of moves so far. Callers record its value at the start of each operation."""
        self._most = most
        self._slow_s = slow_s
        self._step = _FIRST_STEP
        self._is_growing = True
        self._last_value = 0.0
        self._moves_at_failure = 0
        self._reset()

    def succeeded(self, moves: int, num_bytes: int, seconds: float, in_flight: int) -> None:
        """Count an operation that ended while others waited for room.

        `moves`: the value at its start. `in_flight`: the number at its end, this one included.
        """
        if seconds > self._slow_s:
            self.failed(moves)
        elif moves == self.moves:
            self._number += 1
            self._bytes += num_bytes
            self._seconds += seconds
            self._in_flight += in_flight
            if self._number >= max(_FEWEST_MEASURED, in_flight):
                self._compare()

    def failed(self, moves: int) -> None:
        """Halve the factor, once for all operations that were in flight together.

        `moves`: the value at the start of the operation that failed.
        """
        if moves < self._moves_at_failure:
            return
        self._last_value = 0.0
        self._step = _STEP
        self._is_growing = True
        self._move(self.factor / 2)
        self._moves_at_failure = self.moves

    def _compare(self) -> None:
        value = self._bytes / max(self._seconds, 1e-9) * math.sqrt(self._in_flight / self._number)
        if value < self._last_value * (1 - _NOISE):
            self._is_growing = not self._is_growing
            self._step = _STEP
        self._last_value = value
        self._move(self.factor * (self._step if self._is_growing else 1 / self._step))

    def _move(self, factor: float) -> None:
        self.factor = min(max(factor, 1.0), self._most)
        if self.factor in (1.0, self._most):
            self._is_growing = self.factor == 1.0
        self.moves += 1
        self._reset()

    def _reset(self) -> None:
        self._number = self._bytes = self._in_flight = 0
        self._seconds = 0.0
