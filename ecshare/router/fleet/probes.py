# SPDX-License-Identifier: Apache-2.0
"""`/live`, `/ready` and `/status`: what process managers and operators ask."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple

from aiohttp import hdrs, web

from ecshare.router.api.errors import ApiError
from ecshare.router.fleet.engines import Engine, EnginePool
from ecshare.router.fleet.hedging import hedged
from ecshare.router.http.drain import RequestsInFlight
from ecshare.router.http.responses import json_response
from ecshare.router.options.secret import Secret
from ecshare.router.single_flight import SingleFlight
from ecshare.router.types import Stage
from ecshare.store.threads import gather_all

_HEDGE_S = 0.2  # then another engine is asked as well
_FRESH_S = 1.0


class _UnusableError(Exception):
    """An engine does not answer its /health."""


class Readiness:
    """Whether a decode engine is usable. Belongs to the event loop's thread.

    Callers share one check, and its result for a second: nobody can have engines asked more often.
    """

    def __init__(
        self,
        decoders: EnginePool,
        is_healthy: Callable[[Engine], Awaitable[bool]],
        in_flight: RequestsInFlight,
        clock_s: Callable[[], float],
    ) -> None:
        """`is_healthy` asks an engine and takes a few seconds at most."""
        self._decoders = decoders
        self._is_healthy = is_healthy
        self._in_flight = in_flight
        self._clock_s = clock_s
        self._checking: SingleFlight[None, bool] = SingleFlight()
        self._checked_s = float("-inf")
        self._is_usable = False

    async def obstacle(self) -> str | None:
        """Return why no request can be answered now, None if one can."""
        if self._in_flight.is_draining:
            return "the router is shutting down"
        return None if await self._has_decoder() else "no decode engine is usable"

    async def _has_decoder(self) -> bool:
        if self._clock_s() - self._checked_s >= _FRESH_S:
            self._is_usable = await self._checking.run(None, self._check, _FRESH_S)
            self._checked_s = self._clock_s()
        return self._is_usable

    async def _check(self) -> bool:
        usable = [partial(self._ask, each) for each in self._decoders.serving() if not each.is_hung]
        try:
            return bool(usable) and await hedged(usable, _HEDGE_S)
        except _UnusableError:
            return False

    async def _ask(self, engine: Engine) -> bool:
        if not await self._is_healthy(engine):
            raise _UnusableError
        return True


class Checked(NamedTuple):
    """An engine, and whether it has answered its /health."""

    engine: Engine
    is_healthy: bool


class HealthChecks:
    """Whether all engines answer their /health. Belongs to the event loop's thread.

    Callers share one check, and its result for a second: nobody can have engines asked more often.
    """

    def __init__(
        self,
        pools: Mapping[Stage, EnginePool],
        is_healthy: Callable[[Engine], Coroutine[Any, Any, bool]],
        clock_s: Callable[[], float],
    ) -> None:
        """`is_healthy` asks an engine and takes a few seconds at most."""
        self._pools = pools
        self._is_healthy = is_healthy
        self._clock_s = clock_s
        self._checking: asyncio.Task[list[Checked]] | None = None
        self._checked: list[Checked] = []
        self._checked_s = float("-inf")

    async def latest(self) -> list[Checked]:
        """Return the result of a check that is a second old at most; takes a few seconds."""
        if self._is_fresh():
            return self._checked
        if self._checking is None:
            self._checking = asyncio.create_task(self._check())
        return await asyncio.shield(self._checking)

    def _is_fresh(self) -> bool:
        asked = [each.engine for each in self._checked]
        return asked == self._engines() and self._clock_s() - self._checked_s < _FRESH_S

    def _engines(self) -> list[Engine]:
        return [each for pool in self._pools.values() for each in pool]

    async def _check(self) -> list[Checked]:
        engines = self._engines()
        try:
            answers = await gather_all([self._is_healthy(each) for each in engines])
        finally:
            self._checking = None
        both = zip(engines, answers, strict=True)
        self._checked = [Checked(engine, is_healthy) for engine, is_healthy in both]
        self._checked_s = self._clock_s()
        return self._checked


class Probes:
    """The routes."""

    def __init__(
        self,
        readiness: Readiness,
        key: Secret | None,
        status: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        """`status` is what holders of the status key are told."""
        self._readiness = readiness
        self._key = key
        self._status = status

    async def live(self, http: web.Request) -> web.Response:
        """Answer 200 as long as the process serves: a restart would not help otherwise."""
        return json_response(200, {"status": "live"})

    async def ready(self, http: web.Request) -> web.Response:
        """Answer 200 if a request could be answered now, else 503 with the reason."""
        obstacle = await self._readiness.obstacle()
        if obstacle is None:
            return json_response(200, {"status": "ready"})
        return json_response(503, {"status": "not ready", "reason": obstacle})

    async def status(self, http: web.Request) -> web.Response:
        """Return what the router knows. It asks no engine."""
        if self._key is None or not self._key.matches(http.headers.get(hdrs.AUTHORIZATION)):
            message = "/status needs the router's --status-key, as Authorization: Bearer KEY."
            raise ApiError(401, message, code="status_key_needed")
        return json_response(200, await self._status())


def engine_state(pool: EnginePool, engine: Engine) -> dict[str, Any]:
    """Return what is known of an engine."""
    return {
        "name": engine.name,
        "url": engine.url,
        "state": pool.state(engine),
        "models": None if engine.models is None else sorted(engine.models),
        "in_flight": engine.in_flight,
        "tokens": engine.tokens,
    }
