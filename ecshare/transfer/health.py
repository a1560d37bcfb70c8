# SPDX-License-Identifier: Apache-2.0
"""Whether the store is worth asking: a circuit breaker with an injected clock."""

from collections.abc import Callable
from time import monotonic

# So many failures in a row open the breaker; a healthy store has none.
_FAILURES_TO_OPEN = 4
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class StoreHealth:
    """Opens after consecutive failures; then one probe at a time asks the store again.

    While it is open, `allows` is False except for one job per pause; a success closes it, a failed
    probe doubles the pause. So a dead store costs hits, and next to no time.

    Ownership: the I/O thread.
    """

    def __init__(self, clock_s: Callable[[], float] = monotonic) -> None:
        """Start closed. `clock_s`: monotonic seconds."""
        self._clock_s = clock_s
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._next_probe_s = 0.0

    @property
    def is_open(self) -> bool:
        """True while the store counts as gone."""
        return self._failures >= _FAILURES_TO_OPEN

    @property
    def is_worth_asking(self) -> bool:
        """Whether `allows` would say yes; claims nothing."""
        return not self.is_open or self._clock_s() >= self._next_probe_s

    def allows(self) -> bool:
        """Whether a job may go to the store now; True for a probe claims this pause's turn."""
        if not self.is_open:
            return True
        now_s = self._clock_s()
        if now_s < self._next_probe_s:
            return False
        self._next_probe_s = now_s + self._pause_s
        return True

    def succeeded(self) -> None:
        """Record that the store answered, be it with a miss."""
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S

    def failed(self) -> None:
        """Record a failure or a time-out."""
        if self.is_open:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._failures += 1
        if self.is_open:
            self._next_probe_s = self._clock_s() + self._pause_s
