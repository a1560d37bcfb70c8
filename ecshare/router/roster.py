# SPDX-License-Identifier: Apache-2.0
"""Which engines there are: those that are given, and what an operator has changed. Pure.

Changes last until the router ends, whatever is given meanwhile, with two exceptions. An engine that
was added and is then given is one of the given from then on. A removal ends once the engine is not
given any more, so that giving it again brings it back.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ecshare.router.engines import Stage

Urls = Mapping[Stage, tuple[str, ...]]
Models = Mapping[str, frozenset[str]]


class Given(NamedTuple):
    """The engines of a command line or a file."""

    urls: Urls
    assigned_models: Models = {}
    """The models of engines that are used for these alone, by url."""


class ChangeError(Exception):
    """A change that cannot be made. `field` names the part of the order at fault."""

    def __init__(self, reason: str, field: str = "url", *, is_known: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.field = field
        self.is_known = is_known
        """Whether there is an engine with that url."""


class Roster:
    """The engines of all stages. Belongs to the event loop's thread."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._added: dict[str, Stage] = {}
        self._assigned_models: dict[str, frozenset[str]] = {}
        self._removed: set[str] = set()
        self._draining: set[str] = set()

    def give(self, given: Given) -> None:
        """Take these engines for those that are given. Each url is in one stage."""
        self._given = given
        stages = self._stages_given()
        self._added = {url: stage for url, stage in self._added.items() if url not in stages}
        self._assigned_models = {
            url: models for url, models in self._assigned_models.items() if url in self._added
        }
        self._removed &= stages.keys()
        self._draining &= stages.keys() | self._added.keys()

    def urls(self, stage: Stage) -> tuple[str, ...]:
        """Return the engines of a stage, also those that only finish what they have."""
        given = (url for url in self._given.urls[stage] if url not in self._removed)
        added = (url for url, of in self._added.items() if of is stage)
        return tuple(dict.fromkeys((*given, *added)))

    @property
    def assigned_models(self) -> Models:
        """The models of engines that are used for these alone, by url."""
        return {**self._given.assigned_models, **self._assigned_models}

    @property
    def draining(self) -> frozenset[str]:
        """The engines that get no more requests."""
        return frozenset(self._draining)

    def stage_of(self, url: str) -> Stage:
        """Return the stage of an engine.

        Raises:
            ChangeError: there is none with that url.
        """
        for stage in Stage:
            if url in self.urls(stage):
                return stage
        raise ChangeError(f"there is no engine {url}", is_known=False)

    def add(self, stage: Stage, url: str, models: frozenset[str] | None) -> None:
        """Have an engine get requests, for `models` or, if that is None, for all that it lists.

        One that is there already is no longer drained.

        Raises:
            ChangeError: it cannot be.
        """
        before = {**self._stages_given(), **self._added}.get(url, stage)
        if before is not stage:
            raise ChangeError(f"{url} is already an engine of the {before} stage")
        if url not in self._stages_given():
            self._added[url] = stage
        elif models is not None:
            raise ChangeError("the router was given this engine, with its models", "models")
        if models is not None:
            self._assigned_models[url] = models
        self._removed.discard(url)
        self._draining.discard(url)

    def drain(self, url: str) -> None:
        """Have an engine get no more requests.

        Raises:
            ChangeError: there is no such engine, or no decode engine would be left.
        """
        self._check_others_decode(url)
        self._draining.add(url)

    def remove(self, url: str) -> None:
        """Take an engine out. It finishes the requests that it has.

        Raises:
            ChangeError: there is no such engine, or no decode engine would be left.
        """
        self._check_others_decode(url)
        self._draining.discard(url)
        self._assigned_models.pop(url, None)
        if self._added.pop(url, None) is None:
            self._removed.add(url)

    def _check_others_decode(self, url: str) -> None:
        is_needed = self.stage_of(url) is Stage.DECODE and url not in self._draining
        if is_needed and not set(self.urls(Stage.DECODE)) - self._draining - {url}:
            raise ChangeError(f"{url} is the last decode engine: add another one first")

    def _stages_given(self) -> dict[str, Stage]:
        return {url: stage for stage, urls in self._given.urls.items() for url in urls}
