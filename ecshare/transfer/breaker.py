# SPDX-License-Identifier: Apache-2.0
"""What is worth asking for: the store as a whole, and the objects found damaged in it."""

import logging
from collections.abc import Callable
from time import monotonic

from ecshare.store.keys import Key
from ecshare.transfer.recent import Recent

logger = logging.getLogger(__name__)

# So many failures in a row open the breaker; a healthy store has none.
_FAILURES_TO_OPEN = 4
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
# A store that fails now and then is no news every second.
_SAID_EVERY_S = 60.0
_MAX_WORDS = 300
# A damaged object that was not removed is not downloaded for every request that asks for it.
# The pause doubles: what damages all objects, and not this one, may be over soon.
_FIRST_BAD_S = 1.0
_LONGEST_BAD_S = 60.0
_MAX_BAD = 10_000


class CircuitBreaker:
    """Opens after consecutive failures; then one probe at a time asks the store again.

    While it is open, `admit` refuses all but one operation per pause, and that one only when the
    last has ended; a success closes it, a failed probe doubles the pause. So a dead store costs
    hits, and next to no time. Other failures while it is open, and those of operations that began
    before the last success, change nothing: they are old news. The log says when it opens and when
    it closes.

    Ownership: the I/O thread.
    """

    def __init__(self, what: str, clock_s: Callable[[], float] = monotonic) -> None:
        """Start closed. `what` fails or works, for the log; `clock_s`: monotonic seconds."""
        self.what = what
        self._clock_s = clock_s
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._next_probe_s = 0.0
        # Operations are numbered as they begin.
        self._last_begun = 0
        self._last_before_success = 0
        self._probe: int | None = None
        self._is_told = False
        self._next_telling_s = 0.0

    @property
    def is_open(self) -> bool:
        """True while the store counts as gone."""
        return self._failures >= _FAILURES_TO_OPEN

    @property
    def is_worth_asking(self) -> bool:
        """Whether `admit` would say yes; claims nothing."""
        if not self.is_open:
            return True
        return self._probe is None and self._clock_s() >= self._next_probe_s

    def admit(self) -> int | None:
        """Let an operation begin: its number, for `failed` and `ended`; None if it may not.

        While the store counts as gone, it is the probe, and claims this pause's turn.
        """
        if not self.is_worth_asking:
            return None
        self._last_begun += 1
        if self.is_open:
            self._probe = self._last_begun
            self._next_probe_s = self._clock_s() + self._pause_s
        return self._last_begun

    def succeeded(self) -> None:
        """Record that the store answered, be it with a miss."""
        if self.is_open:
            level = logging.INFO if self._is_told else logging.DEBUG
            logger.log(level, "store: %s work again", self.what)
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._last_before_success = self._last_begun

    def failed(self, operation: int, why: str) -> None:
        """Record a failure or a time-out; `why`: the store's own words."""
        if operation <= self._last_before_success:
            return
        if not self.is_open:
            self._failures += 1
            if self.is_open:
                self._tell(why)
        elif operation == self._probe:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        else:
            return  # of the same blip as those that opened it
        if self.is_open:
            self._next_probe_s = self._clock_s() + self._pause_s

    def withdrawn(self, operation: int) -> None:
        """Record that it showed nothing either way: another probe may follow at once."""
        if operation == self._probe:
            self._next_probe_s = self._clock_s()

    def ended(self, operation: int) -> None:
        """Let another probe follow if this was one. Due to all that was admitted, come what may."""
        if operation == self._probe:
            self._probe = None

    def _tell(self, why: str) -> None:
        self._is_told = self._clock_s() >= self._next_telling_s
        if self._is_told:
            self._next_telling_s = self._clock_s() + _SAID_EVERY_S
        words = "".join(each if each.isprintable() else "?" for each in why[:_MAX_WORDS])
        logger.log(
            logging.WARNING if self._is_told else logging.DEBUG,
            "store: %s failed repeatedly and are left alone for a while: %s",
            self.what,
            words,
        )


class DamagedKeys:
    """The objects of the store that were of no use; so many of them as were found last.

    Ownership: the I/O thread.
    """

    def __init__(self) -> None:
        """Know none."""
        self._pauses: Recent[Key, tuple[float, float]] = Recent(_MAX_BAD)  # until when, how long
        self._replaceable: Recent[Key, None] = Recent(_MAX_BAD)

    def is_left_alone(self, key: Key) -> bool:
        """Whether what lies under `key` was of no use a moment ago."""
        until_s, _ = self._pauses.get(key, (0.0, 0.0))
        return monotonic() < until_s

    def must_replace(self, key: Key) -> bool:
        """Whether a save of `key` may find a damaged object in its place."""
        return key in self._replaceable

    def leave_alone(self, key: Key) -> None:
        """Ask for `key` no more for a while."""
        _, last_s = self._pauses.get(key, (0.0, 0.0))
        pause_s = min(2 * last_s, _LONGEST_BAD_S) or _FIRST_BAD_S
        self._pauses[key] = (monotonic() + pause_s, pause_s)

    def may_be_replaced(self, key: Key) -> None:
        """Have the next save of `key` take the place of what is there, if anything is."""
        self._replaceable[key] = None

    def removed(self, key: Key) -> None:
        """Ask for `key` again: the object was removed."""
        self._pauses.pop(key, None)

    def repaired(self, key: Key) -> None:
        """Record that a good object lies under `key`."""
        self._pauses.pop(key, None)
        self._replaceable.pop(key, None)
