# SPDX-License-Identifier: Apache-2.0
"""Whether an engine gets requests. Pure: clocks are passed in.

    up       as any other engine
    failing  it has failed a request: only those that no other engine can take, until it serves one
             or its cool-down ends
    down     it could not be reached: none until its cool-down ends, or an answer comes after all
    hung     (shown as down) it accepted requests and stayed silent: none until its cool-down has
             ended and its /health answers. Then one at a time, until it begins to answer; if it
             hangs instead, its cool-down is twice as long

An engine owes a first byte for every request that it has accepted. While it owes one and sends
nothing at all, its /health is polled (watch.py). It hangs if /health does not answer either, or if
it stays silent for longer than its requests may wait: vLLM's /health may well answer while the GPU
hangs, and so does its server send comments in streams. Neither is a sign of life.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_MAX_DOUBLINGS = 6


@dataclass(frozen=True)
class TimeLimits:
    """How long a request waits for an engine; None: as long as its client does."""

    total_s: float | None = None
    first_byte_s: float | None = None
    """The wait for the first byte of a whole answer, or for the first event of a stream. Only
    requests with this limit detect hung engines."""
    is_last_resort: Callable[[], bool] = lambda: False
    """Whether no other engine could answer. The request then keeps waiting."""


@dataclass(eq=False, slots=True)
class Wait:
    """A request that waits for its first byte."""

    limit_s: float
    clock_s: Callable[[], float]
    is_last_resort: Callable[[], bool]
    """Whether no other engine could answer."""
    give_up: Callable[[TimeoutError], None]
    """Ends the request with this error."""
    began_s: float = 0.0
    num_signs_before: int = 0

    @property
    def is_late(self) -> bool:
        """Whether it has waited for as long as it may."""
        return self.clock_s() - self.began_s >= self.limit_s


class Health:
    """What is known of the health of one engine."""

    def __init__(self, url: str, cool_down_s: float, clock_s: Callable[[], float]) -> None:
        """`url` is for the log."""
        self._url = url
        self._cool_down_s = cool_down_s
        self._clock_s = clock_s
        self.is_hung = False
        self.down_until_s = 0.0
        """When its cool-down ends."""
        self.waits: set[Wait] = set()
        """Those to which it owes a first byte."""
        self.is_watched = False
        """Whether its /health is polled while it is silent."""
        self.num_signs = 0
        """How often it has shown that it works: by a part of an answer."""
        self._failing_until_s = 0.0
        self._num_hangs = 0
        """Since its last sign of life."""
        self._abandoned_at = -1
        """`num_signs` when a request ended without a first byte."""
        self._patience_used = 0.0
        """The fraction of the allowed time that it has been silent while requests waited; 1 is all.
        """

    # Questions

    @property
    def state(self) -> str:
        """As above, "down" also where it hangs."""
        return "down" if self.is_down else "failing" if self.is_failing else "up"

    @property
    def is_down(self) -> bool:
        """Whether it gets no requests."""
        return self.is_hung or self.down_until_s > self._clock_s()

    @property
    def rest_s(self) -> float:
        """How long it is down; infinite if it hangs."""
        return math.inf if self.is_hung else max(0.0, self.down_until_s - self._clock_s())

    @property
    def is_failing(self) -> bool:
        """Whether any other engine is better."""
        return self._failing_until_s > self._clock_s()

    def takes_one_more(self, in_flight: int) -> bool:
        """Tell whether it may get a request besides the `in_flight` that it has."""
        is_down = self.is_hung or self.down_until_s > self._clock_s()
        return not (is_down or (self._num_hangs and in_flight))

    @property
    def is_in_doubt(self) -> bool:
        """Whether it may hang, or hangs, though no request waits."""
        return self.is_hung or self._abandoned_at == self.num_signs

    # Events

    def note_lost_connection(self) -> None:
        """Note that it could not be reached, or ended the connection before an answer."""
        self.down_until_s = max(self.down_until_s, self._clock_s() + self._cool_down_s)

    def note_failure(self) -> None:
        """Note that it has failed a request.

        It stays available: the request may be the cause, and no client may take engines away.
        """
        self._failing_until_s = self._clock_s() + self._cool_down_s

    def note_reached(self) -> None:
        """Note the head of an answer that does not say that the engine is gone."""
        if not self._num_hangs:
            self.down_until_s = 0.0

    def begin_wait(self, wait: Wait) -> None:
        """Note that a request has been sent. Its wait ends with one of the following."""
        wait.began_s, wait.num_signs_before = wait.clock_s(), self.num_signs
        self.waits.add(wait)

    def note_begin(self, wait: Wait | None, *, serves: bool) -> None:
        """Note the first byte of an answer, which `serves` the request or is an error."""
        if wait is not None:
            self.waits.discard(wait)
        if serves:
            self._failing_until_s = 0.0
        self.note_sign_of_life()

    def note_sign_of_life(self) -> None:
        """Note a part of an answer."""
        self.num_signs += 1
        self._patience_used = 0.0
        if self._num_hangs:
            self.is_hung, self._num_hangs, self.down_until_s = False, 0, 0.0

    def note_silence(self, wait: Wait) -> None:
        """Note that `wait` ends without a first byte, though the engine has not refused or broken
        the connection.
        """
        self.end_wait(wait)
        self._abandoned_at = self.num_signs
        if wait.is_late and self.num_signs == wait.num_signs_before:
            self._note_hang("does not answer")

    def end_wait(self, wait: Wait) -> None:
        """Forget `wait`, which says nothing of the engine."""
        self.waits.discard(wait)

    def note_poll(self, *, is_healthy: bool, silent_s: float) -> None:
        """Note what /health says of an engine that has sent nothing else for `silent_s`."""
        if self.is_hung:
            if is_healthy and self.down_until_s <= self._clock_s():
                self.is_hung = False
                logger.info("the engine %s answers its /health again and is tried", self._url)
            return
        self._abandoned_at = -1
        limit_s = min((wait.limit_s for wait in self.waits), default=math.inf)
        self._patience_used += silent_s / limit_s
        if not is_healthy:
            self._note_hang("answers neither requests nor /health")
        elif self._patience_used >= 1:
            self._note_hang("does not answer")

    def note_return(self) -> None:
        """Note that it is used again. Nobody has polled its /health meanwhile."""
        self.is_hung = False

    def _note_hang(self, reason: str) -> None:
        self._patience_used = 0.0
        if self.is_hung:
            return
        rest_s = self._cool_down_s * 2 ** min(self._num_hangs, _MAX_DOUBLINGS)
        self.down_until_s = max(self.down_until_s, self._clock_s() + rest_s)
        self.is_hung = True
        self._num_hangs += 1
        logger.warning("the engine %s %s: it is left out", self._url, reason)
