# SPDX-License-Identifier: Apache-2.0
"""Decides how much of a hit to load: no more than is here sooner than it would be computed."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import exp, inf
from typing import NamedTuple

from ecshare.transfer.jobs import Tier
from kvshare.prefix import Chunk, ChunkKey

Tiers = Mapping[ChunkKey, Tier]

# What was measured so long ago counts 1/e of what is measured now.
_MEMORY_S = 10.0
# Steps with fewer tokens of prompts show what a step costs, and not what a token does.
_FEWEST_TOKENS = 64
# Where loads take longer, an engine that has loaded all prompts so far computes one.
_SLOW_S = 1.0
# A tier from which nothing was loaded for so long is tried again, with so much of a hit as should
# be here in the second time, or with one chunk.
_PROBE_EVERY_S = 30.0
_PROBE_S = 2.0
# A look-up takes a step of the engine, and a load two more: no less than this.
_ROUNDS_S = 0.005
# More than any engine has in flight.
_MOST_STEPS = 8


class Pace:
    """Seconds per token of late; None until something was measured. Ownership: one thread."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        """`clock_s`: monotonic seconds."""
        self._clock_s = clock_s
        self._tokens = self._seconds = 0.0
        self._then_s = -inf

    def add(self, num_tokens: int, seconds: float) -> None:
        """Take a measurement. Its weight is its number of tokens, and fades with time."""
        now_s = self._clock_s()
        left = exp((self._then_s - now_s) / _MEMORY_S)
        self._then_s = now_s
        self._tokens = self._tokens * left + num_tokens
        self._seconds = self._seconds * left + seconds

    @property
    def s_per_token(self) -> float | None:
        """Seconds per token."""
        return self._seconds / self._tokens if self._tokens else None


class Steps:
    """Measures how fast this engine computes, from when its steps are scheduled and when they end.

    With asynchronous scheduling a step is scheduled while the one before it runs, and begins when
    that one has ended. Ownership: vLLM's scheduler thread.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        """`clock_s`: monotonic seconds."""
        self.pace = Pace(clock_s)
        self._clock_s = clock_s
        # The tokens of each, or 0 if it tells nothing of prompts; and when it was scheduled.
        self._running: list[tuple[int, float]] = []
        self._ended_s = -inf

    def began(self, num_tokens: int, num_decoded: int) -> None:
        """A step was scheduled that computes `num_tokens`, of which so many are not of prompts.

        Steps without tokens report their end, or do not.
        """
        if num_tokens:
            num_prompt_tokens = num_tokens - num_decoded
            is_prefill = num_prompt_tokens >= max(_FEWEST_TOKENS, num_decoded)
            step = (num_tokens if is_prefill else 0), self._clock_s()
            self._running = [*self._running[1 - _MOST_STEPS :], step]

    def ended(self) -> None:
        """The oldest step has ended."""
        if not self._running:
            return
        (num_tokens, begun_s), *self._running = self._running
        now_s = self._clock_s()
        seconds = now_s - max(begun_s, self._ended_s)
        self._ended_s = now_s
        if num_tokens:
            self.pace.add(num_tokens, seconds)


class _Run(NamedTuple):
    """Consecutive chunks in one tier."""

    tier: Tier
    end: int
    """The number of the chunk after it."""
    num_tokens: int


class LoadOrCompute:
    """Compares what a load takes with what it saves, by measurements of this engine.

    What is not known counts as faster than computing: the first load from each tier is made. The
    time of a load contains all that a request waits for: latency, other loads, and the copy to its
    blocks.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        """`clock_s`: monotonic seconds."""
        self._clock_s = clock_s
        self.steps = Steps(clock_s)
        self._loads = {tier: Pace(clock_s) for tier in Tier}
        self._tried_s = dict.fromkeys(Tier, -inf)
        self._computed_s = -inf
        self._under_way_s = 0.0

    @property
    def fewest_tokens(self) -> int:
        """How many tokens a hit must have to be worth a look-up: this engine computes fewer before
        it would have loaded them. 0: it is not known."""
        pace = self.steps.pace.s_per_token
        return int(_ROUNDS_S / pace) if pace else 0

    def loaded(
        self, chunks: Sequence[Chunk], tiers: Tiers, start_tokens: int, seconds: float
    ) -> None:
        """Take note that these chunks were loaded, from `start_tokens` on, in so many seconds.

        `tiers`: where they were, as far as a look-up asked; nothing is learnt if it did not. What
        came from the host counts for nothing beside what came from the store.
        """
        if not tiers:
            return
        runs = _runs(chunks, tiers, start_tokens)
        tier = Tier.STORE if any(run.tier is Tier.STORE for run in runs) else Tier.HOST
        self._tried_s[tier] = self._clock_s()
        self._loads[tier].add(sum(run.num_tokens for run in runs if run.tier is tier), seconds)

    def num_worth_loading(
        self,
        chunks: Sequence[Chunk],
        tiers: Tiers,
        start_tokens: int,
        under_way_s: float,
        num_ahead: Callable[[], int],
    ) -> int:
        """Return how many of `chunks`, the first ones, to load after `start_tokens`. O(chunks).

        `under_way_s`: seconds per token that some load from the store has taken until now, which
        goes on: it will not take less. `num_ahead`: returns how many tokens the engine computes
        before it comes to this request: a load goes on meanwhile. Called only if a load seems to be
        slower than computing.
        """
        if not chunks:
            return 0
        self._under_way_s = under_way_s
        compute_s = self.steps.pace.s_per_token
        runs = _runs(chunks, tiers, start_tokens)
        if compute_s is None:
            return 0 if self._is_to_compute(runs) else len(chunks)
        best = self._best(runs, compute_s, 0.0)
        if best < len(chunks):
            best = self._best(runs, compute_s, num_ahead() * compute_s)
        if best < len(chunks):
            best = max(best, self._probe(chunks, tiers, start_tokens, best))
        return best

    def _best(self, runs: Sequence[_Run], compute_s: float, ahead_s: float) -> int:
        """Return the number of chunks with which the hit is ready first; of equal ones the largest.

        Times are proportional to tokens, so nothing but the end of a run can be best.
        """
        left = sum(run.num_tokens for run in runs)
        load_s, best = 0.0, (ahead_s + left * compute_s, 0)
        for run in runs:
            load_s += self._load_s(run.tier, run.num_tokens)
            left -= run.num_tokens
            ready_s = max(ahead_s, load_s) + left * compute_s
            if ready_s <= best[0]:
                best = ready_s, run.end
        return best[1]

    def _is_to_compute(self, runs: Sequence[_Run]) -> bool:
        """Whether to compute a hit only because it is not known how long that takes."""
        now_s = self._clock_s()
        load_s = sum(self._load_s(run.tier, run.num_tokens) for run in runs)
        if load_s < _SLOW_S or now_s - self._computed_s < _PROBE_EVERY_S:
            return False
        self._computed_s = now_s
        return True

    def _load_s(self, tier: Tier, num_tokens: int) -> float:
        """Return the seconds that a load should take; none from a tier that was never measured."""
        s_per_token = self._loads[tier].s_per_token or 0.0
        if tier is Tier.STORE:
            s_per_token = max(s_per_token, self._under_way_s)
        return num_tokens * s_per_token

    def _probe(self, chunks: Sequence[Chunk], tiers: Tiers, start_tokens: int, first: int) -> int:
        """Return how many chunks to load only to measure the tier of chunk `first` anew."""
        now_s, tier = self._clock_s(), _filled(chunks, tiers)[first]
        is_under_way = tier is Tier.STORE and self._under_way_s > 0
        if is_under_way or now_s - self._tried_s[tier] < _PROBE_EVERY_S:
            return 0
        self._tried_s[tier] = now_s  # not by its end: no other request is to try meanwhile
        affordable = int(_PROBE_S / self._load_s(tier, 1))
        first_token = max(start_tokens, chunks[first].start_tokens)
        ends = [chunk.end_tokens - first_token for chunk in chunks[first:]]
        return first + max(1, bisect_right(ends, affordable))


def _runs(chunks: Sequence[Chunk], tiers: Tiers, start_tokens: int) -> list[_Run]:
    """Return the chunks by the tiers in which they are, in order."""
    runs, end = [], 0
    for tier, group in groupby(_filled(chunks, tiers)):
        first, end = end, end + len(list(group))
        position = max(start_tokens, chunks[first].start_tokens)
        runs.append(_Run(tier, end, chunks[end - 1].end_tokens - position))
    return runs


def _filled(chunks: Sequence[Chunk], tiers: Tiers) -> list[Tier]:
    """Return the tier of each chunk. One for which nobody asked is where the next one is for which
    somebody did: a host has the beginning of a prompt, or all of it."""
    found, tier = [], Tier.STORE
    for chunk in reversed(chunks):
        tier = tiers.get(chunk.key, tier)
        found.append(tier)
    return found[::-1]
