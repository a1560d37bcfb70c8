# SPDX-License-Identifier: Apache-2.0
"""Which models the engines serve, as far as they tell. A slow list delays nobody.

Engines of one stage may serve different models. vLLM lists a LoRA adapter as a model too, with the
name of its base model as its `parent`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from ecshare.router.api.errors import ApiError, EngineError, RefusalError
from ecshare.router.fleet.engines import Engine, EnginePool
from ecshare.router.types import Stage

Headers = Mapping[str, str]
Cards = Mapping[str, Mapping[str, Any]]
"""What an engine says of its models, by their names, in its order."""

_FRESH_S = 5.0
_SETTLED_S = 1.0
_FRESH_FOR_REFUSAL_S = 1.0  # so that an adapter loaded just now is found
MAX_WAIT_S = 1.0
_MAX_SHOWN = 20


@dataclass(eq=False)
class _Listing:
    """What one engine listed last."""

    cards: Cards = field(default_factory=dict)
    began_s: float = float("-inf")
    """When the last reading began that was not refused."""
    told_s: float = float("-inf")
    """When the last reading began that has returned a list."""
    is_silent: bool = False
    """Whether the last reading failed or was slow. Nobody waits for the next one."""
    reading: asyncio.Task[None] | None = None

    @property
    def is_reading(self) -> bool:
        return self.reading is not None and not self.reading.done()


class ServedModels:
    """The models that engines listed last. The lists are refreshed behind the requests.

    A request for a model that a decode engine lists passes at once, however old the list is. Any
    other waits for one refresh, for a limited time, and not at all for engines whose last list
    failed or was slow. Belongs to the event loop's thread.
    """

    def __init__(
        self,
        pools: Mapping[Stage, EnginePool],
        read: Callable[[Engine, Headers], Awaitable[Cards | None]],
        check_client: Callable[[Headers], Awaitable[None]],
        clock_s: Callable[[], float],
    ) -> None:
        """`read` asks an engine with a client's headers.

        It returns None if the engine does not tell. It raises EngineError if it does not answer in
        time, and RefusalError if it does not serve the client. `check_client` raises them too.
        """
        self._pools = pools
        self._read = read
        self._check_client = check_client
        self._clock_s = clock_s
        self._settled_at: list[int] = []
        """The pools' `num_changes` when the following was true."""
        self._settled_until_s: dict[str | None, float] = {}
        """Until when a model needs no look at the lists, by models that all stages know."""
        self._listings: WeakKeyDictionary[Engine, _Listing] = WeakKeyDictionary()

    async def resolve(self, model: str | None, headers: Headers) -> str | None:
        """Return the model that a request is for: the one that it names, else the one that all
        decode engines take for such a request. None: they have not told.

        Raises:
            ApiError: no decode engine serves the model, or they differ and the request names none.
            RefusalError: the same, and the engines do not serve this client.
        """
        now_s = self._clock_s()
        changes = [pool.num_changes for pool in self._pools.values()]
        if changes != self._settled_at:
            self._settled_at, self._settled_until_s = changes, {}
        if now_s < self._settled_until_s.get(model, 0.0):
            return model
        latest_s = now_s - _FRESH_FOR_REFUSAL_S
        is_known = self._knows_all(model)
        self._refresh(headers, _FRESH_S if is_known else _FRESH_FOR_REFUSAL_S)
        if not is_known:
            await self._wait()
        elif model is not None:
            self._settled_until_s[model] = now_s + _SETTLED_S
        if model is None:
            return await self._usual(headers)
        if not self._knows(model) and self._have_told(latest_s):
            error = ApiError(404, f"The model `{model}` does not exist.", code="model_not_found")
            raise await self._with_names(error, headers)
        return model

    async def union(self, headers: Headers) -> list[Mapping[str, Any]]:
        """Return what there is to say of each model that a decode engine serves.

        Raises:
            EngineError: no decode engine tells.
            RefusalError: the engines do not serve this client.
        """
        await self._check_client(headers)
        self._refresh(headers, _FRESH_FOR_REFUSAL_S)
        await self._wait()
        models: dict[str, Mapping[str, Any]] = {}
        for engine in self._decoders():
            models |= {
                name: card for name, card in self.cards(engine).items() if name not in models
            }
        if not models:
            raise EngineError(Stage.DECODE, "no engine lists its models", reached=True)
        return list(models.values())

    def cards(self, engine: Engine) -> Cards:
        """Return what an engine last said of the models that it is used for."""
        listed = self._of(engine).cards
        if engine.assigned_models is None:
            return listed
        return {
            name: listed.get(name) or _own_card(name) for name in sorted(engine.assigned_models)
        }

    async def close(self) -> None:
        """Cancel the readings in progress."""
        tasks = [each.reading for each in self._listings.values() if each.reading is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _of(self, engine: Engine) -> _Listing:
        return self._listings.setdefault(engine, _Listing())

    def _decoders(self) -> Sequence[Engine]:
        return self._pools[Stage.DECODE].serving()

    def _knows(self, model: str | None) -> bool:
        """Tell whether a decode engine serves the model, or, for None, has told what it serves."""
        known = [each.models for each in self._decoders() if each.models is not None]
        return bool(known) if model is None else any(model in models for models in known)

    def _knows_all(self, model: str | None) -> bool:
        """Tell whether it is known, for each stage, which engines serve the model."""
        engines = (each for pool in self._pools.values() for each in pool.serving(model))
        return self._knows(model) and all(each.models is not None for each in engines)

    def _have_told(self, after_s: float) -> bool:
        """Tell whether no decode engine is left that may serve more than is known. Lists count if
        they were asked for after `after_s`.
        """
        engines = self._decoders()
        asked = [self._of(engine) for engine in engines if engine.assigned_models is None]
        untold = [listing for listing in asked if listing.told_s <= after_s]
        return len(untold) < len(engines) and all(listing.is_silent for listing in untold)

    async def _usual(self, headers: Headers) -> str | None:
        usual = {name for engine in self._decoders() for name in list(self.cards(engine))[:1]}
        if len(usual) > 1:
            message = "`model` is missing, and engines serve several."
            raise await self._with_names(ApiError(400, message, code="model_needed"), headers)
        return next(iter(usual), None)

    async def _with_names(self, error: ApiError, headers: Headers) -> ApiError:
        """Return an error of the field `model`, with the names of what there is for clients that
        may know it.

        Raises:
            RefusalError: the engines do not serve this client.
        """
        error.param = "model"
        try:
            await self._check_client(headers)
        except EngineError:
            return error
        names = sorted({name for each in self._decoders() for name in self.cards(each)})
        shown = ", ".join(f"`{name}`" for name in names[:_MAX_SHOWN])
        more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
        error.message += f" There is: {shown}{more}."
        return error

    async def _wait(self) -> None:
        """Wait for the readings in progress, unless the engine was slow or failed last time."""
        awaited = [each for each in self._listings.values() if each.is_reading]
        tasks = [each.reading for each in awaited if each.reading and not each.is_silent]
        if tasks:
            await asyncio.wait(tasks, timeout=MAX_WAIT_S)
        for listing in awaited:
            listing.is_silent = listing.is_silent or listing.is_reading

    def _refresh(self, headers: Headers, age_s: float) -> None:
        """Start to read each list whose last reading started at least `age_s` ago and has ended."""
        for engine in self._engines_up():
            listing = self._of(engine)
            if not listing.is_reading and self._clock_s() - listing.began_s >= age_s:
                listing.began_s = self._clock_s()
                update = self._update(engine, listing, headers)
                listing.reading = asyncio.create_task(update)

    def _engines_up(self) -> Iterator[Engine]:
        for pool in self._pools.values():
            for engine in pool.serving():
                if pool.state(engine) == "down":
                    self._of(engine).is_silent = True
                else:
                    yield engine

    async def _update(self, engine: Engine, listing: _Listing, headers: Headers) -> None:
        try:
            cards = await self._read(engine, headers)
        except EngineError:
            listing.is_silent = True
            return
        except RefusalError:
            listing.began_s = float("-inf")  # no client may keep others from being told
            return
        listing.is_silent = False
        if cards is not None:
            listing.told_s = listing.began_s
            listing.cards = cards
            bases = {name: _base(card) for name, card in cards.items()}
            self._pools[engine.stage].set_listed(engine, bases)


def _base(card: Mapping[str, Any]) -> str | None:
    base = card.get("parent")
    return base if isinstance(base, str) else None


def _own_card(name: str) -> Mapping[str, Any]:
    """Return what clients are told of a model that only the operator names."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "ecshare"}
