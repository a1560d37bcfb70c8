# SPDX-License-Identifier: Apache-2.0
"""Decides how much of a hit to load: as much as should load faster than the engine computes it."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import exp, inf
from typing import NamedTuple

from ecshare.transfer.jobs import Tier
from kvshare.chunks.prefix import Chunk, ChunkKey

Tiers = Mapping[ChunkKey, Tier]
UnderWay = tuple[int, float]
"""The tokens of a load in flight, and the seconds that it has taken until now."""

# A measurement of this age counts 1/e of a new one.
_MEMORY_S = 10.0
# Steps with fewer tokens of prompts measure the cost of a step, not that of a token.
_FEWEST_TOKENS = 64
# While its compute time is unknown, an engine loads as much of a prompt as should take this long,
# and computes the rest.
_SLOW_S = 1.0
# The first load from a store is of this many tokens of a hit, or of one chunk.
_FIRST_TOKENS = 1024
# Loads of one size do not distinguish latency from time per token: then all time counts as time per
# token. With this weighted variance of sizes, the fitted slope has as much weight as that rule.
_FEW_TOKENS = 256
# A tier without loads for _PROBE_EVERY_S is measured again, by as much of a hit as should take
# _PROBE_S, or by one chunk.
_PROBE_EVERY_S = 30.0
_PROBE_S = 2.0
# A look-up takes a step of the engine, and a load two more: in all at least this long.
_ROUNDS_S = 0.005
# More steps than any engine has in flight. If there are more, a release of vLLM no longer reports
# their ends. Steps then count as longer than they were, and more is loaded.
_MOST_STEPS = 64
# A new pace is accepted once most tokens of the latest steps, this many, have it.
_STEPS_KEPT = 15


class _Sums:
    """Sums of measurements, whose weights decay with time. Ownership: one thread."""

    def __init__(self, clock_s: Callable[[], float], number: int) -> None:
        """Begin `number` sums at 0. `clock_s`: monotonic seconds."""
        self._clock_s = clock_s
        self._then_s = -inf
        self.values = (0.0,) * number

    def add(self, *terms: float) -> None:
        """Add one term to each sum."""
        now_s = self._clock_s()
        left = exp((self._then_s - now_s) / _MEMORY_S)
        self._then_s = now_s
        self.values = tuple(
            value * left + term for value, term in zip(self.values, terms, strict=True)
        )


class Pace:
    """The recent seconds per token; None until measured. Ownership: one thread.

    It is that of the median token of the latest steps. So no single measurement determines it, such
    as the first step of an engine, or one during which the machine did other work.
    """

    def __init__(self) -> None:
        self.s_per_token: float | None = None
        self._steps: deque[tuple[float, int]] = deque(maxlen=_STEPS_KEPT)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Add a measurement. Its weight is its number of tokens."""
        self._steps.append((seconds / num_tokens, num_tokens))
        half = sum(tokens for _, tokens in self._steps) / 2
        for s_per_token, tokens in sorted(self._steps):
            half -= tokens
            if half <= 0:
                self.s_per_token = s_per_token
                return


class Line(NamedTuple):
    """The expected time of a load, as a linear function of its tokens."""

    latency_s: float
    s_per_token: float

    def seconds(self, num_tokens: int) -> float:
        """Return the expected seconds for `num_tokens`."""
        return self.latency_s + num_tokens * self.s_per_token

    def num_tokens(self, seconds: float) -> float:
        """Return how many tokens should be loaded in `seconds`."""
        left_s = seconds - self.latency_s
        if left_s <= 0:
            return 0.0
        return left_s / self.s_per_token if self.s_per_token else inf


_AT_ONCE = Line(0.0, 0.0)


class LoadTimes:
    """Fits a straight line to the times of recent loads from one tier. Ownership: one thread.

    The line is fitted by weighted least squares: its slope is the weighted covariance of tokens and
    seconds over the weighted variance of tokens, and it goes through both means (NIST/SEMATECH
    e-Handbook of Statistical Methods, 4.1.4.3). The weight of a load is one over its tokens,
    because the variance of its time grows with them, and decays with time.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        """Begin without measurements. `clock_s`: monotonic seconds."""
        self._sums = _Sums(clock_s, 5)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Add a measurement."""
        self._sums.add(1 / num_tokens, 1.0, seconds / num_tokens, num_tokens, seconds)

    @property
    def line(self) -> Line | None:
        """Return the line; None until measured. Neither latency nor time per token is negative."""
        weights, counts, paces, tokens, seconds = self._sums.values
        if not weights:
            return None
        mean_tokens, mean_s, pace = counts / weights, paces / weights, seconds / tokens
        variance = max(0.0, tokens - counts * mean_tokens)
        covariance = seconds - counts * mean_s
        slope = max(0.0, (covariance + _FEW_TOKENS * pace) / (variance + _FEW_TOKENS))
        latency_s = mean_s - slope * mean_tokens
        return Line(latency_s, slope) if latency_s >= 0 else Line(0.0, pace)


class Steps:
    """Measures how fast this engine computes, by the times when steps are scheduled and end.

    With asynchronous scheduling a step is scheduled while the one before it runs, and begins when
    that one has ended. Steps end in the order in which they were scheduled.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        """Begin without measurements. `clock_s`: monotonic seconds."""
        self.pace = Pace()
        self._clock_s = clock_s
        # For each step: its tokens, the tokens to measure (0: too few of prompts), and when it was
        # scheduled.
        self._running: deque[tuple[int, int, float]] = deque(maxlen=_MOST_STEPS)
        self._ended_s = -inf

    def began(self, num_tokens: int, num_decoded: int) -> None:
        """Record that a step of `num_tokens` was scheduled; `num_decoded` are not of prompts.

        Also call it for steps that compute nothing.
        """
        num_prompt_tokens = num_tokens - num_decoded
        is_prefill = num_prompt_tokens >= max(_FEWEST_TOKENS, num_decoded)
        self._running.append((num_tokens, num_tokens if is_prefill else 0, self._clock_s()))

    def ended(self) -> None:
        """Record that vLLM has processed the output of the oldest step."""
        if not self._running:
            return
        num_tokens, num_measured, begun_s = self._running.popleft()
        if not num_tokens:
            return  # the step did not use the device
        now_s = self._clock_s()
        seconds = now_s - max(begun_s, self._ended_s)
        self._ended_s = now_s
        if num_measured:
            self.pace.add(num_measured, seconds)


class _Run(NamedTuple):
    """Consecutive chunks in one tier, or the state of recurrent layers."""

    tier: Tier
    end: int
    """The number of the chunk after it."""
    num_tokens: int
    """The number of tokens that need not be computed with it; 0 for a state."""
    moved_tokens: int
    """The number of tokens whose chunks are as many bytes."""


class LoadOrCompute:
    """Compares the time of a load with the compute time that it saves, as measured in this engine.

    A tier without measurements counts as faster than computing, so it is measured by its first
    load. From the store, the first load is small, and the only one in flight. The time of a load
    contains all that a request waits for: latency, other loads, and the copy to its blocks.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, clock_s: Callable[[], float], state_tokens: int = 0) -> None:
        """Begin without measurements. `clock_s`: monotonic seconds. `state_tokens`: the number of
        tokens whose chunks are as many bytes as a state of the model's recurrent layers."""
        self._clock_s = clock_s
        self._state_tokens = state_tokens
        self.steps = Steps(clock_s)
        self._loads = {tier: LoadTimes(clock_s) for tier in Tier}
        self._tried_s = dict.fromkeys(Tier, -inf)

    @property
    def fewest_tokens(self) -> int:
        """Return how many tokens a hit must have to be worth a look-up; 0: it is not known.

        Fewer tokens are computed in less time than a look-up and a load take.
        """
        pace = self.steps.pace.s_per_token
        return int(_ROUNDS_S / pace) if pace else 0

    def loaded(
        self, chunks: Sequence[Chunk], tiers: Tiers, start_tokens: int, seconds: float
    ) -> None:
        """Record that these chunks were loaded, from `start_tokens` on, in `seconds`.

        `tiers`: of the chunks that were looked up; if it is empty, nothing is recorded. If some
        chunks came from the store, the time counts only for those.
        """
        runs = self._runs(chunks, tiers, start_tokens) if tiers else []
        if not runs:
            return
        tier = Tier.STORE if any(run.tier is Tier.STORE for run in runs) else Tier.HOST
        self._tried_s[tier] = self._clock_s()
        self._loads[tier].add(sum(run.moved_tokens for run in runs if run.tier is tier), seconds)

    def num_worth_loading(
        self,
        chunks: Sequence[Chunk],
        tiers: Tiers,
        start_tokens: int,
        under_way: Sequence[UnderWay],
        num_ahead: Callable[[], int],
    ) -> int:
        """Return how many of `chunks`, the first ones, to load after `start_tokens`. O(chunks).

        If they end with a state, it is all or none of them. `under_way`: the loads from the store
        in flight; a state counts as `state_tokens`. `num_ahead`: returns how many tokens the engine
        computes before it reaches this request, while the load runs. It is called only if loading
        seems to be slower than computing.
        """
        runs = self._runs(chunks, tiers, start_tokens)
        if not runs:
            return 0
        most = self._most(chunks, tiers, start_tokens, is_alone=not under_way)
        delay_s = self._delay_s(under_way)
        lines = self._lines(delay_s)
        compute_s = self.steps.pace.s_per_token
        if compute_s is None:
            return _all_or_none(chunks, min(most, _num_fast(chunks, runs, lines, start_tokens)))
        best = _best(runs, lines, compute_s, 0.0)
        if best < len(chunks):
            best = _best(runs, lines, compute_s, num_ahead() * compute_s)
        if best < len(chunks):
            best = max(best, self._probe(chunks, tiers, start_tokens, best, is_late=delay_s > 0))
        return _all_or_none(chunks, min(best, most))

    def _runs(self, chunks: Sequence[Chunk], tiers: Tiers, start_tokens: int) -> list[_Run]:
        """Return the runs of consecutive chunks in one tier, in order, and that of the state.

        Runs that end before `start_tokens` are omitted: the local hit may have grown since the
        look-up.
        """
        runs, end = [], 0
        attention = [chunk for chunk in chunks if not chunk.is_state]
        for tier, group in groupby(_filled(attention, tiers)):
            first, end = end, end + len(list(group))
            num_tokens = chunks[end - 1].end_tokens - max(start_tokens, chunks[first].start_tokens)
            if num_tokens > 0:
                runs.append(_Run(tier, end, num_tokens, num_tokens))
        if runs and chunks[-1].is_state:
            tier = tiers.get(chunks[-1].key, Tier.STORE)
            runs.append(_Run(tier, len(chunks), 0, self._state_tokens))
        return runs

    def _delay_s(self, under_way: Sequence[UnderWay]) -> float:
        """Return the largest delay of a load from the store in flight, beyond its expected time.

        A new load may wait for the same cause.
        """
        line = self._loads[Tier.STORE].line or _AT_ONCE
        delays = (seconds - line.seconds(num_tokens) for num_tokens, seconds in under_way)
        return max(0.0, max(delays, default=0.0))

    def _lines(self, delay_s: float) -> dict[Tier, Line]:
        """Return the expected times of loads from each tier; zero for a tier never measured."""
        lines = {tier: loads.line or _AT_ONCE for tier, loads in self._loads.items()}
        store = lines[Tier.STORE]
        lines[Tier.STORE] = store._replace(latency_s=store.latency_s + delay_s)
        return lines

    def _most(
        self, chunks: Sequence[Chunk], tiers: Tiers, start_tokens: int, *, is_alone: bool
    ) -> int:
        """Return the limit of chunks to load: all, unless the store was never measured."""
        if self._loads[Tier.STORE].line is not None:
            return len(chunks)
        tier_of_each = _filled(chunks, tiers)
        if Tier.STORE not in tier_of_each:
            return len(chunks)
        first = tier_of_each.index(Tier.STORE)
        if not is_alone:
            return first
        if chunks[-1].is_state:
            return len(chunks)
        return first + max(1, _num_within(_FIRST_TOKENS, chunks[first:], start_tokens))

    def _probe(
        self,
        chunks: Sequence[Chunk],
        tiers: Tiers,
        start_tokens: int,
        first: int,
        *,
        is_late: bool,
    ) -> int:
        """Return how many chunks to load only to measure the tier of chunk `first` anew."""
        now_s, tier = self._clock_s(), _filled(chunks, tiers)[first]
        is_waiting = is_late and tier is Tier.STORE
        if is_waiting or now_s - self._tried_s[tier] < _PROBE_EVERY_S:
            return 0
        self._tried_s[tier] = now_s  # set at once, so that no other request probes meanwhile
        if chunks[-1].is_state:
            return len(chunks)
        num_tokens = (self._loads[tier].line or _AT_ONCE).num_tokens(_PROBE_S)
        return first + max(1, _num_within(num_tokens, chunks[first:], start_tokens))


def _best(
    runs: Sequence[_Run], lines: Mapping[Tier, Line], compute_s: float, ahead_s: float
) -> int:
    """Return the number of chunks to load for which the hit is ready first; the largest if equal.

    Only ends of runs are tried, because times within a run are proportional to tokens. With a
    state, that is the last run, only the end of all is tried.
    """
    left = sum(run.num_tokens for run in runs)
    best = ahead_s + left * compute_s, 0
    needs_all = not runs[-1].num_tokens
    for run, load_s in zip(runs, _load_times(runs, lines), strict=True):
        left -= run.num_tokens
        if needs_all and run is not runs[-1]:
            continue
        ready_s = max(ahead_s, load_s) + left * compute_s
        if ready_s <= best[0]:
            best = ready_s, run.end
    return best[1]


def _load_times(runs: Sequence[_Run], lines: Mapping[Tier, Line]) -> Iterator[float]:
    """Yield the expected seconds of a load to the end of each run.

    They are the largest latency of its tiers, plus the sum of the times of all its tokens.
    """
    latency_s = moving_s = 0.0
    for run in runs:
        line = lines[run.tier]
        latency_s = max(latency_s, line.latency_s)
        moving_s += run.moved_tokens * line.s_per_token
        yield latency_s + moving_s


def _num_fast(
    chunks: Sequence[Chunk],
    runs: Sequence[_Run],
    lines: Mapping[Tier, Line],
    start_tokens: int,
) -> int:
    """Return how many chunks to load while the compute time is unknown: as many as should load
    within _SLOW_S. Computing the rest measures the compute time."""
    first, left_s = 0, _SLOW_S
    for run in runs:
        line = lines[run.tier]
        if line.seconds(run.moved_tokens) > left_s:
            if not run.num_tokens:
                return first
            return first + _num_within(line.num_tokens(left_s), chunks[first:], start_tokens)
        first, left_s = run.end, left_s - line.seconds(run.moved_tokens)
    return first


def _num_within(num_tokens: float, chunks: Sequence[Chunk], start_tokens: int) -> int:
    """Return how many of `chunks`, from the first on, fit into `num_tokens`.

    Tokens before `start_tokens` do not count.
    """
    first_token = max(start_tokens, chunks[0].start_tokens)
    return bisect_right([chunk.end_tokens - first_token for chunk in chunks], num_tokens)


def _all_or_none(chunks: Sequence[Chunk], num: int) -> int:
    """Return `num`, or 0 if it leaves out the state that `chunks` end with."""
    return 0 if chunks[-1].is_state and num < len(chunks) else num


def _filled(chunks: Sequence[Chunk], tiers: Tiers) -> list[Tier]:
    """Return the tier of each chunk, also of chunks that were not looked up.

    Between two chunks that were, the slower of their tiers is assumed. If a host has only a part of
    a prompt, it is the end: loads open the first chunk first, and eviction removes the entries that
    were opened longest ago.
    """
    found: list[Tier] = []
    before: Tier | None = None
    for number, chunk in enumerate(chunks):
        tier = tiers.get(chunk.key)
        if tier is not None:
            between = Tier.STORE if before is Tier.STORE else tier
            found += [between] * (number - len(found))
            found.append(tier)
            before = tier
    return found + [before or Tier.STORE] * (len(chunks) - len(found))
