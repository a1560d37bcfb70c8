# SPDX-License-Identifier: Apache-2.0
"""The engines' lists of models: what clients may ask for, and whom the engines accept."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from ecshare.router.api.errors import EngineError, RefusalError
from ecshare.router.fleet.client import Call, EngineClient
from ecshare.router.fleet.clients import KnownClients
from ecshare.router.fleet.engines import Engine, EnginePool
from ecshare.router.fleet.health import TimeLimits
from ecshare.router.fleet.hedging import hedged
from ecshare.router.fleet.models import Cards, Headers, ServedModels
from ecshare.router.http.context import CONTEXT
from ecshare.router.http.responses import json_response
from ecshare.router.types import Stage

MODELS = "/v1/models"
TIMEOUT_S = 5.0
HEDGE_S = 0.2  # then another engine is asked as well
_MAX_ASKED = 3
"""How many engines may be asked about one client."""
_MAX_MODELS = 10_000


class _List(Struct):
    data: list[dict[str, Any]]


class ModelLists:
    """Asks engines for their models. Belongs to the event loop's thread."""

    def __init__(
        self, pools: Mapping[Stage, EnginePool], client: EngineClient, clock_s: Callable[[], float]
    ) -> None:
        self._pools = pools
        self._client = client
        self._clients = KnownClients(self._ask_about_client, clock_s)
        self._served = ServedModels(pools, self._read, self.check_client, clock_s)

    async def close(self) -> None:
        """Cancel what is in progress."""
        await self._served.close()
        await self._clients.close()

    async def models(self, http: web.Request) -> web.Response:
        """Answer with the models of all decode engines."""
        models = await self._served.union(http[CONTEXT].headers)
        return json_response(200, {"object": "list", "data": models})

    async def resolve(self, model: str | None, headers: Headers) -> str | None:
        """See `ServedModels.resolve`."""
        return await self._served.resolve(model, headers)

    async def check_client(self, headers: Headers) -> None:
        """Check that the engines would serve a client with these headers.

        Raises:
            RefusalError: decode refuses them.
            EngineError: decode does not tell.
        """
        await self._clients.check(headers)

    async def _read(self, engine: Engine, headers: Headers) -> Cards | None:
        call, body = await self._ask(engine, headers)
        _check_accepted(call, body)
        return _cards(body) if call.status == 200 else None

    async def _ask(self, engine: Engine, headers: Headers) -> tuple[Call, bytes | bytearray]:
        async with self._client.get(engine, MODELS, headers, TimeLimits(TIMEOUT_S)) as call:
            body = await call.read()
        if call.failed:
            raise EngineError(engine.stage, f"HTTP {call.status}", reached=True)
        return call, body

    async def _ask_about_client(self, headers: Headers) -> None:
        engines = self._pools[Stage.DECODE].ranked(_MAX_ASKED)
        if not engines:
            raise EngineError(Stage.DECODE, "there is no engine", reached=False)
        asks = [partial(self._ask, engine, headers) for engine in engines]
        call, body = await hedged(asks, HEDGE_S)
        _check_accepted(call, body)
        if call.status != 200:
            reason = f"{MODELS} is HTTP {call.status}, which says nothing of the client"
            raise EngineError(Stage.DECODE, reason, reached=True)


def _check_accepted(call: Call, body: bytes | bytearray) -> None:
    """Check that an engine serves the client.

    Raises:
        RefusalError: it does not.
    """
    if call.status in (401, 403):
        raise RefusalError(call.status, bytes(body), call.content_type)


def _cards(body: bytes | bytearray) -> Cards | None:
    """Return the models in a list, None if it is none."""
    try:
        models = msgspec.json.decode(body, type=_List).data[:_MAX_MODELS]
    except (ValueError, RecursionError):
        return None
    return {each["id"]: each for each in models if isinstance(each.get("id"), str)}
