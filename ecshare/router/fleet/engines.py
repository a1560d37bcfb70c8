# SPDX-License-Identifier: Apache-2.0
"""The engines of each stage, their load, and which one is next. Pure: the clock is passed in."""

import hashlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from ecshare.router.types import Stage, Work

_MAX_DOUBLINGS = 6
_MAX_MODELS = 1000
_UP = ("up", "doubtful")
_NOTHING_ASSIGNED: Mapping[str, frozenset[str]] = {}
USUAL_BOUND = 1.25


_ANY_WORK = Work()


@dataclass(eq=False)
class Engine:
    """One engine, as the router sees it. Only its `EnginePool` changes it."""

    stage: Stage
    url: str
    number: int = 0
    """From 1 on; of no other engine of its stage. Used again when the engine is gone."""
    in_flight: int = 0
    tokens: int = 0
    """The work in flight, estimated."""
    down_until_s: float = 0.0
    last_turn: int = 0
    doubtful_until_s: float = 0.0
    """Its last answer was a failure. Until then it gets a request only if no other engine can."""
    streams: bool = False
    """Whether its last answer stated that it stores KV while it computes."""
    is_hung: bool = False
    """Whether it accepted requests and answered none. It gets none until its /health answers."""
    num_hangs: int = 0
    """How often it has hung since its last answer. Above 0 the engine is on probation: it gets one
    request at a time, whatever its /health answers."""
    listed: Mapping[str, str | None] | None = None
    """The models that it listed last, adapters with their base models; None: it has never told."""
    assigned_models: frozenset[str] | None = None
    """The models that the operator wants it to be used for; None: all that it lists."""
    num_heard: int = 0
    """How often it has shown that it works: by a part of an answer."""

    @property
    def name(self) -> str:
        """A name that tells nothing of where the engine is, such as `prefill-1`."""
        return f"{self.stage}-{self.number}"

    @property
    def models(self) -> Collection[str] | None:
        """The models that it gets requests for; None: nobody knows."""
        return self.listed if self.assigned_models is None else self.assigned_models


class EnginePool:
    """The engines of one stage. Belongs to the event loop's thread; nothing here blocks."""

    def __init__(
        self,
        stage: Stage,
        urls: Iterable[str],
        cool_down_s: float,
        clock_s: Callable[[], float],
        bound: float = USUAL_BOUND,
    ) -> None:
        """`bound`: how much more work than the mean an engine may have, and still get a request
        because of what it has in its caches; 1 for the mean itself.
        """
        self.stage = stage
        self._bound = bound
        self._ever: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._serving: dict[str | None, tuple[Engine, ...]] = {}
        """What `serving` has returned since engines or models changed."""
        self.num_changes = 0
        """How often the engines, or the models that they serve, have changed."""
        self.update(urls)
        self._cool_down_s = cool_down_s
        self._clock_s = clock_s
        self._turn = 0

    def __len__(self) -> int:
        return len(self._engines)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    def update(
        self,
        urls: Iterable[str],
        assigned_models: Mapping[str, frozenset[str]] = _NOTHING_ASSIGNED,
    ) -> None:
        """Have these engines get requests, and no others. Engines that stay keep their state, and
        engines that go keep the requests that they have.

        `assigned_models`: the models of those that are used for these alone, by url.
        """
        known = {engine.url: engine for engine in self._ever}
        taken = {engine.number for engine in self._ever}
        free = (number for number in count(1) if number not in taken)
        self._engines = [known.get(url) or Engine(self.stage, url, next(free)) for url in urls]
        self._ever.update(self._engines)
        for engine in self._engines:
            engine.assigned_models = assigned_models.get(engine.url)
        self._note_change()

    @property
    def leaving(self) -> list[Engine]:
        """The engines that are none of these any more, but still have requests."""
        gone = self._ever.difference(self._engines)
        return sorted((each for each in gone if each.in_flight), key=lambda each: each.number)

    def num_up(self, engines: Iterable[Engine]) -> int:
        """Return how many of these get requests: they neither cool down nor hang."""
        return sum(self.state(engine) in _UP for engine in engines)

    def state(self, engine: Engine) -> str:
        """Return "up", "down", "doubtful" for one that failed its last request, or "draining" for
        one of `leaving`, which gets no more requests."""
        if engine not in self._engines:
            return "draining"
        now_s = self._clock_s()
        if engine.is_hung or engine.down_until_s > now_s:
            return "down"
        return "doubtful" if self._is_doubtful(engine) else "up"

    def serving(self, model: str | None = None) -> tuple[Engine, ...]:
        """Return the engines that may get requests for `model`, also those that are down now.

        If none is known to serve it, these are the engines of which nobody knows. None: all.
        """
        found = self._serving.get(model)
        if found is None:
            if len(self._serving) >= _MAX_MODELS:  # clients choose the names
                self._serving.clear()
            found = self._serving[model] = tuple(self._find_serving(model))
        return found

    def _note_change(self) -> None:
        self.num_changes += 1
        self._serving.clear()

    def _find_serving(self, model: str | None) -> list[Engine]:
        if model is None:
            return self._engines
        known = [each for each in self._engines if each.models is not None and model in each.models]
        return known or [each for each in self._engines if each.models is None]

    def choose(self, excluded: Collection[Engine] = (), work: Work = _ANY_WORK) -> Engine | None:
        """Return the best available engine for `work` that is not in `excluded`, None if there is
        none.

        Work with a key goes to the engine that got such work before, unless that engine has far
        more to do than others; then to the next one in an order that is the key's own. Work
        without a key goes to the least busy engine. Among equally busy engines that is the least
        recently used one, so light traffic goes round. Doubtful engines come last.
        """
        serving = self.serving(work.model)
        if len(serving) == 1:
            (only,) = serving
            return only if only not in excluded and _is_up(only, self._clock_s()) else None
        live = [each for each in self._live(work.model) if each not in excluded]
        if not work.key or not live:
            return next(iter(live), None)
        is_doubtful = self._is_doubtful(live[0])
        peers = [each for each in live if self._is_doubtful(each) == is_doubtful]
        return self._by_affinity(peers, work)

    def _by_affinity(self, engines: Sequence[Engine], work: Work) -> Engine:
        """Choose by rendezvous hashing with bounded load: with each engine that comes or goes only
        its own keys move. All routers agree without talking to each other.
        """
        total = sum(each.tokens for each in engines) + work.tokens
        limit = self._bound * total / len(engines)
        ranked = sorted(engines, key=lambda each: _rank(work.key, each.url))
        return next((each for each in ranked if each.tokens < limit), engines[0])

    def _is_doubtful(self, engine: Engine) -> bool:
        return engine.doubtful_until_s > self._clock_s()

    def soonest_available(
        self, model: str | None = None, excluded: Collection[Engine] = ()
    ) -> Engine | None:
        """Return the engine whose cool-down ends first; for callers without another choice.

        If none serves `model`, as far as is known, it is one of all.
        """
        engines = self.serving(model) or self.serving()
        left = [each for each in engines if each not in excluded]
        return min(left, key=lambda each: (each.is_hung, each.down_until_s), default=None)

    def ranked(self, number: int) -> list[Engine]:
        """Return up to `number` available engines, the best first.

        If none is available, it is the one that will be soonest.
        """
        soonest_available = self.soonest_available()
        return self._live()[:number] or [each for each in (soonest_available,) if each]

    def _live(self, model: str | None = None) -> list[Engine]:
        """Return the available engines that serve `model`, the best first."""
        now_s = self._clock_s()
        live = [engine for engine in self.serving(model) if _is_up(engine, now_s)]
        return sorted(live, key=lambda each: (self._is_doubtful(each), *_by_load(each)))

    def begin(self, engine: Engine, tokens: int) -> None:
        """Count one more request in flight on `engine`, and its work, until `end`."""
        self._turn += 1
        engine.last_turn = self._turn
        engine.in_flight += 1
        engine.tokens += tokens

    @staticmethod
    def end(engine: Engine, tokens: int) -> None:
        """Count one request less in flight."""
        engine.in_flight -= 1
        engine.tokens -= tokens

    def mark_failed(self, engine: Engine) -> None:
        """Start the cool-down of `engine`: until it ends, the engine gets no request."""
        down_until_s = self._clock_s() + self._cool_down_s
        engine.down_until_s = max(engine.down_until_s, down_until_s)

    def mark_doubtful(self, engine: Engine) -> None:
        """Prefer other engines to `engine`, which has failed a request, for the cool-down.

        It stays available: the request may be the cause, and no client may take engines away.
        """
        engine.doubtful_until_s = self._clock_s() + self._cool_down_s

    @staticmethod
    def mark_good(engine: Engine) -> None:
        """Note that `engine` has served a request."""
        engine.doubtful_until_s = 0.0

    def mark_answered(self, engine: Engine) -> None:
        """End the cool-down of an engine that answers again, unless it has hung."""
        if not engine.num_hangs:
            engine.down_until_s = 0.0

    def mark_hung(self, engine: Engine) -> None:
        """Send `engine` nothing until `try_recover`. Its cool-down doubles each time."""
        rest_s = self._cool_down_s * 2 ** min(engine.num_hangs, _MAX_DOUBLINGS)
        engine.down_until_s = max(engine.down_until_s, self._clock_s() + rest_s)
        engine.is_hung = True
        engine.num_hangs += 1

    def try_recover(self, engine: Engine) -> bool:
        """Put a hung engine that is healthy again on probation. False: it is still cooling down."""
        if self._clock_s() < engine.down_until_s:
            return False
        engine.is_hung = False
        return True

    @staticmethod
    def mark_alive(engine: Engine) -> None:
        """Forget that `engine` hung: it has begun to answer."""
        if engine.num_hangs:
            engine.is_hung = False
            engine.num_hangs = 0
            engine.down_until_s = 0.0

    def base_of(self, adapter: str) -> str | None:
        """Return the base model of a LoRA adapter; None: it is none, as far as is known."""
        return next(
            (base for each in self._engines if (base := (each.listed or {}).get(adapter))), None
        )

    def set_listed(self, engine: Engine, models: Mapping[str, str | None]) -> None:
        """Remember which models `engine` lists, adapters with their base models."""
        if engine.listed != models:
            engine.listed = models
            self._note_change()


def _is_up(engine: Engine, now_s: float) -> bool:
    is_busy_on_probation = engine.num_hangs > 0 and engine.in_flight > 0
    return engine.down_until_s <= now_s and not engine.is_hung and not is_busy_on_probation


def _by_load(engine: Engine) -> tuple[int, int, int]:
    return engine.tokens, engine.in_flight, engine.last_turn


def _rank(key: bytes, url: str) -> bytes:
    return hashlib.sha256(key + url.encode()).digest()
