# SPDX-License-Identifier: Apache-2.0
"""Which models the engines serve, and which clients they accept, as far as they tell.

Engines with an API key tell only clients that they accept, so they are asked with clients' headers:
the router has no key. Engines of one stage may serve different models. A slow list delays nobody.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from ecshare.router.api.errors import ApiError, EngineError, RefusalError
from ecshare.router.fleet.engines import Cards, Engine, EnginePool
from ecshare.router.types import Stage
from ecshare.store.recent import Recent
from ecshare.store.threads import end_all

TIMEOUT_S = 5.0
HEDGE_S = 0.2  # then another engine is asked about a client as well
MAX_WAIT_S = 1.0
_FRESH_S = 5.0
_FRESH_FOR_REFUSAL_S = 1.0  # so that an adapter loaded just now is found
_SETTLED_S = 1.0
_MAX_ASKED = 3
"""How many engines may be asked about one client."""
CLIENT_FRESH_S = 10.0
CLIENT_KEPT_S = 300.0
MAX_CLIENTS = 4096
_MAX_MODELS = 10_000
_MAX_SHOWN = 20

Headers = Mapping[str, str]
Read = Callable[[Engine, Headers, float], Awaitable[bytes | bytearray | None]]
"""Returns an engine's list, within so many seconds. See `EngineClient.models`."""


class _List(msgspec.Struct):
    data: list[dict[str, Any]]


class KnownClients:
    """Remembers the credentials (Authorization headers) that decode accepted, as hashes.

    A known client passes at once, and its credential is checked again in the background. Refusals
    are not remembered. Belongs to the event loop's thread.
    """

    def __init__(
        self, ask: Callable[[Headers], Awaitable[None]], clock_s: Callable[[], float]
    ) -> None:
        """`ask` asks decode with a client's headers.

        It raises RefusalError if decode refuses them, and EngineError if decode does not tell.
        """
        self._ask = ask
        self._clock_s = clock_s
        self._accepted_s: Recent[bytes, float] = Recent(MAX_CLIENTS)
        self._asking: dict[bytes, asyncio.Task[None]] = {}

    async def check(self, headers: Headers) -> None:
        """Return if the engines would serve a client with these headers.

        Raises:
            RefusalError: decode refuses them.
            EngineError: decode does not tell.
        """
        key = hashlib.sha256(headers.get("Authorization", "").encode()).digest()
        age_s = self._clock_s() - self._accepted_s.get(key, float("-inf"))
        if age_s >= CLIENT_KEPT_S:
            await self._update(key, headers)
        elif age_s >= CLIENT_FRESH_S and key not in self._asking:
            self._asking[key] = asyncio.create_task(self._refresh(key, headers))

    async def close(self) -> None:
        """Cancel the checks in progress."""
        await end_all(self._asking.values())

    async def _refresh(self, key: bytes, headers: Headers) -> None:
        try:
            with contextlib.suppress(EngineError, RefusalError):
                await self._update(key, headers)
        finally:
            del self._asking[key]

    async def _update(self, key: bytes, headers: Headers) -> None:
        try:
            await self._ask(headers)
        except RefusalError:
            self._accepted_s.pop(key, None)
            raise
        self._accepted_s[key] = self._clock_s()


@dataclass(eq=False)
class _Listing:
    """The readings of one engine's list."""

    began_s: float = float("-inf")
    """When the last reading began that was not refused."""
    told_s: float = float("-inf")
    """When the last reading began that has returned a list."""
    is_silent: bool = False
    """Whether the last reading failed or was slow. Nobody waits for the next one."""
    reading: asyncio.Task[None] | None = None
    """The one in progress."""


class ModelLists:
    """The models that engines listed last. The lists are refreshed behind the requests.

    A request for a model that a decode engine lists passes at once, however old the list is. Any
    other waits for one refresh, for a limited time, and not at all for engines whose last list
    failed or was slow. Belongs to the event loop's thread.
    """

    def __init__(
        self, pools: Mapping[Stage, EnginePool], read: Read, clock_s: Callable[[], float]
    ) -> None:
        self._pools = pools
        self._read = read
        self._clock_s = clock_s
        self._clients = KnownClients(self._ask_about_client, clock_s)
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
        is_known = self._all_tell(model)
        self._refresh(headers, _FRESH_S if is_known else _FRESH_FOR_REFUSAL_S)
        if not is_known:
            await self._wait()
        elif model is not None:
            self._settled_until_s[model] = now_s + _SETTLED_S
        if model is None:
            return await self._usual(headers)
        if not self._has_decoder(model) and self._have_told(now_s - _FRESH_FOR_REFUSAL_S):
            error = ApiError(404, f"The model `{model}` does not exist.", code="model_not_found")
            raise await self._with_names(error, headers)
        return model

    async def cards(self, headers: Headers) -> Cards:
        """Return what there is to say of each model that a decode engine serves, by its name.

        Raises:
            EngineError: no decode engine tells.
            RefusalError: the engines do not serve this client.
        """
        await self.check_client(headers)
        self._refresh(headers, _FRESH_FOR_REFUSAL_S)
        await self._wait()
        cards = self._cards()
        if not cards:
            raise EngineError(Stage.DECODE, "no engine lists its models", reached=True)
        return cards

    async def check_client(self, headers: Headers) -> None:
        """Check that the engines would serve a client with these headers.

        Raises:
            RefusalError: decode refuses them.
            EngineError: decode does not tell.
        """
        await self._clients.check(headers)

    async def close(self) -> None:
        """Cancel what is in progress."""
        await self._clients.close()
        await end_all([each.reading for each in self._listings.values() if each.reading])

    async def _ask_about_client(self, headers: Headers) -> None:
        """Ask some decode engines; a slow one delays nobody."""
        engines = self._pools[Stage.DECODE].ranked()[:_MAX_ASKED]
        asks = [
            asyncio.create_task(self._ask(engine, headers, number * HEDGE_S))
            for number, engine in enumerate(engines)
        ]
        failure = EngineError(Stage.DECODE, "there is no engine", reached=False)
        try:
            for answer in asyncio.as_completed(asks):
                try:
                    return await answer
                except EngineError as exc:
                    failure = exc
            raise failure
        finally:
            await end_all(asks)
            asks.clear()  # breaks cycles: tracebacks of errors refer to this frame
            del failure

    async def _ask(self, engine: Engine, headers: Headers, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        if await self._read(engine, headers, TIMEOUT_S) is None:
            reason = "its list of models says nothing of the client"
            raise EngineError(Stage.DECODE, reason, reached=True)

    def _decoders(self) -> Sequence[Engine]:
        return self._pools[Stage.DECODE].serving()

    def _cards(self) -> Cards:
        cards: dict[str, Mapping[str, Any]] = {}
        for engine in self._decoders():
            for name in _names(engine):
                cards.setdefault(name, _card(engine, name))
        return cards

    def _has_decoder(self, model: str) -> bool:
        return any(model in (each.models or ()) for each in self._decoders())

    def _all_tell(self, model: str | None) -> bool:
        """Tell whether it is known, for each stage, which engines serve the model."""
        engines = [each for pool in self._pools.values() for each in pool.serving(model)]
        is_served = bool(engines) if model is None else self._has_decoder(model)
        return is_served and all(each.models is not None for each in engines)

    def _have_told(self, after_s: float) -> bool:
        """Tell whether no decode engine is left that may serve more than is known. Lists count if
        they were asked for after `after_s`.
        """
        engines = self._decoders()
        asked = [self._of(engine) for engine in engines if engine.assigned_models is None]
        untold = [listing for listing in asked if listing.told_s <= after_s]
        return len(untold) < len(engines) and all(listing.is_silent for listing in untold)

    async def _usual(self, headers: Headers) -> str | None:
        usual = {name for engine in self._decoders() for name in _names(engine)[:1]}
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
            await self.check_client(headers)
        except EngineError:
            return error
        names = sorted(self._cards())
        shown = ", ".join(f"`{name}`" for name in names[:_MAX_SHOWN])
        more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
        error.message += f" There is: {shown}{more}."
        return error

    # Lists

    def _of(self, engine: Engine) -> _Listing:
        return self._listings.setdefault(engine, _Listing())

    async def _wait(self) -> None:
        """Wait for the readings in progress, unless the engine was slow or failed last time."""
        awaited = [each for each in self._listings.values() if each.reading is not None]
        readings = [each.reading for each in awaited if each.reading and not each.is_silent]
        if readings:
            await asyncio.wait(readings, timeout=MAX_WAIT_S)
        for listing in awaited:
            listing.is_silent = listing.is_silent or listing.reading is not None

    def _refresh(self, headers: Headers, age_s: float) -> None:
        """Start to read each list whose last reading started at least `age_s` ago and has ended."""
        now_s = self._clock_s()
        for engine in [each for pool in self._pools.values() for each in pool]:
            listing = self._of(engine)
            if engine.health.is_down:
                listing.is_silent = True
            elif listing.reading is None and now_s - listing.began_s >= age_s:
                listing.began_s = now_s
                update = self._update(engine, listing, headers)
                listing.reading = asyncio.create_task(update)

    async def _update(self, engine: Engine, listing: _Listing, headers: Headers) -> None:
        try:
            cards = _decoded(await self._read(engine, headers, TIMEOUT_S))
            listing.is_silent = False
            if cards is not None:
                listing.told_s = listing.began_s
                self._pools[engine.stage].set_cards(engine, cards)
        except EngineError:
            listing.is_silent = True
        except RefusalError:
            listing.began_s = float("-inf")  # no client may keep others from being told
        finally:
            listing.reading = None


def _decoded(body: bytes | bytearray | None) -> Cards | None:
    """Return the models in a list, None if it is none."""
    try:
        models = msgspec.json.decode(body or b"", type=_List).data[:_MAX_MODELS]
    except (ValueError, RecursionError):
        return None
    return {each["id"]: each for each in models if isinstance(each.get("id"), str)}


def _names(engine: Engine) -> Sequence[str]:
    """Return the models that an engine is used for, the one first that it takes for granted."""
    assigned = engine.assigned_models
    return list(engine.cards or ()) if assigned is None else sorted(assigned)


def _card(engine: Engine, name: str) -> Mapping[str, Any]:
    """Return what an engine last said of a model; something of ours if it says nothing."""
    ours = {"id": name, "object": "model", "created": 0, "owned_by": "ecshare"}
    return (engine.cards or {}).get(name) or ours
