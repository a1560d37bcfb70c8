# SPDX-License-Identifier: Apache-2.0
"""The engines of each stage, their load, and which one is next. Pure: the clock is passed in."""

import hashlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ecshare.router.fleet.health import Health
from ecshare.router.types import Stage, Work

Cards = Mapping[str, Mapping[str, Any]]
"""What an engine lists of its models, by their names, in its order. vLLM lists a LoRA adapter as a
model too, with the name of its base model as its `parent`."""

_MAX_MODELS = 1000
USUAL_BOUND = 1.25
_ANY_WORK = Work()


@dataclass(eq=False)
class Engine:
    """One engine, as the router sees it."""

    stage: Stage
    url: str
    number: int
    """From 1 on; of no other engine of its stage. Used again when the engine is gone."""
    name: str
    """Tells nothing of where the engine is, such as `prefill-1`."""
    health: Health
    is_leaving: bool = False
    """Whether it is none of its pool's any more."""
    in_flight: int = 0
    tokens: int = 0
    """The work in flight, estimated."""
    last_turn: int = 0
    streams: bool = False
    """Whether its last answer stated that it stores KV while it computes."""
    cards: Cards | None = None
    """The models that it listed last; None: it has never told."""
    assigned_models: frozenset[str] | None = None
    """The models that the operator wants it to be used for; None: all that it lists."""

    @property
    def models(self) -> Collection[str] | None:
        """The models that it gets requests for; None: nobody knows."""
        return self.cards if self.assigned_models is None else self.assigned_models

    @property
    def state(self) -> str:
        """That of its health, or "draining": it only finishes the requests that it has."""
        return "draining" if self.is_leaving else self.health.state

    def shown(self) -> dict[str, Any]:
        """Return what operators see of it."""
        return {
            "name": self.name,
            "url": self.url,
            "state": self.state,
            "models": None if self.models is None else sorted(self.models),
            "in_flight": self.in_flight,
            "tokens": self.tokens,
        }


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
        self._cool_down_s = cool_down_s
        self._clock_s = clock_s
        self._bound = bound
        self._turn = 0
        self._ever: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._serving: dict[str | None, tuple[Engine, ...]] = {}
        """What `serving` has returned since engines or models changed."""
        self.num_changes = 0
        """How often the engines, or the models that they serve, have changed."""
        self.update(urls)

    def __len__(self) -> int:
        return len(self._engines)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    def update(
        self, urls: Iterable[str], assigned_models: Mapping[str, frozenset[str]] | None = None
    ) -> None:
        """Have these engines get requests, and no others. Engines that stay keep their state, and
        engines that go keep the requests that they have.

        `assigned_models`: the models of those that are used for these alone, by url.
        """
        known = {engine.url: engine for engine in self._ever}
        taken = {engine.number for engine in self._ever}
        free = (number for number in count(1) if number not in taken)
        self._engines = [known.get(url) or self._new(url, next(free)) for url in urls]
        self._ever.update(self._engines)
        for engine in self._ever:
            is_used = engine in self._engines
            if is_used and engine.is_leaving:
                engine.health.note_return()
            if is_used:
                engine.assigned_models = (assigned_models or {}).get(engine.url)
            engine.is_leaving = not is_used
        self._note_change()

    def _new(self, url: str, number: int) -> Engine:
        health = Health(url, self._cool_down_s, self._clock_s)
        return Engine(self.stage, url, number, f"{self.stage}-{number}", health)

    @property
    def leaving(self) -> list[Engine]:
        """The engines that are none of these any more, but still have requests."""
        gone = (each for each in self._ever if each.is_leaving and each.in_flight)
        return sorted(gone, key=lambda each: each.number)

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

    def _find_serving(self, model: str | None) -> list[Engine]:
        if model is None:
            return self._engines
        known = [each for each in self._engines if each.models is not None and model in each.models]
        return known or [each for each in self._engines if each.models is None]

    def base_of(self, adapter: str) -> str | None:
        """Return the base model of a LoRA adapter; None: it is none, as far as is known."""
        for engine in self._engines:
            base = (engine.cards or {}).get(adapter, {}).get("parent")
            if isinstance(base, str) and base:
                return base
        return None

    def set_cards(self, engine: Engine, cards: Cards) -> None:
        """Remember what `engine` lists."""
        is_news = engine.cards is None or engine.cards.keys() != cards.keys()
        engine.cards = cards
        if is_news:
            self._note_change()

    def _note_change(self) -> None:
        self.num_changes += 1
        self._serving.clear()

    def choose(self, excluded: Collection[Engine] = (), work: Work = _ANY_WORK) -> Engine | None:
        """Return the best available engine for `work` that is not in `excluded`, None if there is
        none.

        Work with a key goes to the engine that got such work before, unless that engine has far
        more to do than others; then to the next one in an order that is the key's own. Work
        without a key goes to the least busy engine. Among equally busy engines that is the least
        recently used one, so light traffic goes round. Failing engines come last.
        """
        live = [
            each
            for each in self.serving(work.model)
            if each.health.takes_one_more(each.in_flight) and each not in excluded
        ]
        if len(live) < 2:
            return live[0] if live else None
        live = [each for each in live if not each.health.is_failing] or live
        if work.key and len(live) > 1:
            return self._by_affinity(live, work)
        return min(live, key=_by_load)

    def _by_affinity(self, engines: Sequence[Engine], work: Work) -> Engine:
        """Choose by rendezvous hashing with bounded load: with each engine that comes or goes only
        its own keys move. All routers agree without talking to each other.
        """
        total = sum(each.tokens for each in engines) + work.tokens
        limit = self._bound * total / len(engines)
        ranked = sorted(engines, key=lambda each: _rank(work.key, each.url))
        least = min(engines, key=_by_load)
        return next((each for each in ranked if each.tokens < limit), least)

    def ranked(self, model: str | None = None) -> list[Engine]:
        """Return the engines that may serve `model`, the best first; at the end those that are
        down, the first that will be back before others. If none serves it, as far as is known,
        these are all engines.
        """
        return sorted(self.serving(model) or self.serving(), key=_by_state_and_load)

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


def _by_load(engine: Engine) -> tuple[int, int, int]:
    return engine.tokens, engine.in_flight, engine.last_turn


def _by_state_and_load(engine: Engine) -> tuple[float, bool, int, int, int]:
    return engine.health.rest_s, engine.health.is_failing, *_by_load(engine)


def _rank(key: bytes, url: str) -> bytes:
    return hashlib.sha256(key + url.encode()).digest()
