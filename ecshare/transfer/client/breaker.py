# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker of the store, and the list of damaged objects."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from time import monotonic

from ecshare.store.errors import StoreUnavailable
from ecshare.store.keys import Key
from ecshare.store.recent import Recent

logger = logging.getLogger(__name__)

# This many failures in a row open the breaker; a healthy store has none.
_FAILURES_TO_OPEN = 4
FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
# A store that fails now and then is reported at most this often.
_WARN_EVERY_S = 60.0
_MAX_WORDS = 300
# A damaged object that was not removed is not downloaded again for every request that needs it.
# The pause starts short and doubles: a fault that damages all objects may be over soon.
FIRST_BAD_S = 1.0
_LONGEST_BAD_S = 60.0
_MAX_BAD = 10_000


class Verdict(Enum):
    """The state of the store, as the end of an operation shows it."""

    WORKS = auto()
    FAILED = auto()
    UNKNOWN = auto()
    """The operation shows nothing. Another probe may follow at once."""


Verdicts = tuple[tuple[type[Exception], Verdict], ...]
"""The verdict of each exception; the first match counts. Other exceptions show nothing."""


class CircuitBreaker:
    """A circuit breaker: opens after consecutive failures, and then admits one probe at a time.

    While it is open, `attempt` rejects all operations except one per pause, the probe, and that one
    only when the last probe has ended. A success closes it. A failed probe doubles the pause. So a
    dead store costs hits, but hardly any time. Other failures while it is open, and failures of
    operations that began before the last success, are ignored. The log reports when it opens and
    when it closes.

    Ownership: the I/O thread.
    """

    def __init__(self, what: str, clock_s: Callable[[], float] = monotonic) -> None:
        """Start closed. `what`: its name in the log, in plural; `clock_s`: monotonic seconds."""
        self.what = what
        self._clock_s = clock_s
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._next_probe_s = 0.0
        # Operations are numbered as they begin.
        self._last_begun = 0
        self._last_before_success = 0
        self._probe: int | None = None
        self._is_logged = False
        self._next_warning_s = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether the breaker is open: the store counts as down."""
        return self._failures >= _FAILURES_TO_OPEN

    def check(self) -> None:
        """Check that `attempt` would admit an operation now, without beginning one.

        Raises:
            StoreUnavailable: it would not.
        """
        if self.is_open and (self._probe is not None or self._clock_s() < self._next_probe_s):
            raise StoreUnavailable(f"{self.what} failed repeatedly, and are paused for a while")

    @contextmanager
    def attempt(self, verdicts: Verdicts) -> Iterator[None]:
        """Do one operation in the body. `verdicts`: what its exceptions show.

        While the breaker is open, the operation is the probe of this pause.

        Raises:
            StoreUnavailable: it may not begin.
        """
        self.check()
        self._last_begun += 1
        operation = self._last_begun
        if self.is_open:
            self._probe = operation
            self._next_probe_s = self._clock_s() + self._pause_s
        try:
            yield
        except BaseException as exc:
            shown = (verdict for kind, verdict in verdicts if isinstance(exc, kind))
            self._ended(operation, next(shown, Verdict.UNKNOWN), str(exc))
            raise
        self._ended(operation, Verdict.WORKS, "")

    def _ended(self, operation: int, verdict: Verdict, why: str) -> None:
        if verdict is Verdict.WORKS:
            self._succeeded()
        elif verdict is Verdict.FAILED:
            self._failed(operation, why)
        elif operation == self._probe:
            self._next_probe_s = self._clock_s()
        if operation == self._probe:
            self._probe = None

    def _succeeded(self) -> None:
        if self.is_open:
            level = logging.INFO if self._is_logged else logging.DEBUG
            logger.log(level, "store: %s work again", self.what)
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._last_before_success = self._last_begun

    def _failed(self, operation: int, why: str) -> None:
        if operation <= self._last_before_success:
            return
        if not self.is_open:
            self._failures += 1
            if self.is_open:
                self._log_open(why)
        elif operation == self._probe:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        else:
            return  # part of the outage that opened the breaker
        if self.is_open:
            self._next_probe_s = self._clock_s() + self._pause_s

    def _log_open(self, why: str) -> None:
        self._is_logged = self._clock_s() >= self._next_warning_s
        if self._is_logged:
            self._next_warning_s = self._clock_s() + _WARN_EVERY_S
        words = "".join(each if each.isprintable() else "?" for each in why[:_MAX_WORDS])
        logger.log(
            logging.WARNING if self._is_logged else logging.DEBUG,
            "store: %s failed repeatedly, and are paused for a while: %s",
            self.what,
            words,
        )


class DamagedKeys:
    """The objects of the store that could not be used; the last `_MAX_BAD` that were found.

    Ownership: the I/O thread.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._pauses: Recent[Key, tuple[float, float]] = Recent(_MAX_BAD)  # until when, how long
        self.replaceable: Recent[Key, None] = Recent(_MAX_BAD)
        """Keys under which the store may hold a damaged object, which a save replaces."""

    def is_quarantined(self, key: Key) -> bool:
        """Return whether the object under `key` is not to be read now, because it was damaged."""
        until_s, _ = self._pauses.get(key, (0.0, 0.0))
        return monotonic() < until_s

    def quarantine(self, key: Key) -> None:
        """Stop reading `key` for a while, twice as long as the last time."""
        _, last_s = self._pauses.get(key, (0.0, 0.0))
        pause_s = min(2 * last_s, _LONGEST_BAD_S) or FIRST_BAD_S
        self._pauses[key] = (monotonic() + pause_s, pause_s)

    def removed(self, key: Key) -> None:
        """Record that the damaged object was removed: `key` may be read again."""
        self._pauses.pop(key, None)

    def repaired(self, key: Key) -> None:
        """Record that a good object is stored under `key`."""
        self._pauses.pop(key, None)
        self.replaceable.pop(key, None)
