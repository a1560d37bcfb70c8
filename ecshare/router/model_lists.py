# SPDX-License-Identifier: Apache-2.0
"""The engines' lists of models: what clients may ask for, and whom the engines accept."""

from collections.abc import Callable, Mapping
from functools import partial

import msgspec
from aiohttp import web

from ecshare.router.clients import KnownClients
from ecshare.router.engines import Engine, EnginePool, Stage
from ecshare.router.errors import ApiError, EngineError, RefusalError
from ecshare.router.health import TimeLimits
from ecshare.router.hedging import hedged
from ecshare.router.middleware import CONTEXT, verbatim
from ecshare.router.models import ServedModels
from ecshare.router.relay import Relay, Reply

MODELS = "/v1/models"
_TIMEOUT_S = 5.0
_HEDGE_S = 0.2  # then another engine is asked as well
_MAX_LISTS = 3
"""How many engines may be asked for the same list."""


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


class ModelLists:
    """Asks engines for their models. Belongs to the event loop's thread."""

    def __init__(
        self, pools: Mapping[Stage, EnginePool], relay: Relay, clock_s: Callable[[], float]
    ) -> None:
        self._pools = pools
        self._relay = relay
        self._served = ServedModels(self._served_models, clock_s)
        self._clients = KnownClients(self._ask_about_client, clock_s)

    async def close(self) -> None:
        """Cancel what is in progress."""
        await self._served.close()
        await self._clients.close()

    async def models(self, http: web.Request) -> web.Response:
        """Pass on the model list of D, or of P if no D can be reached."""
        headers = http[CONTEXT].headers
        try:
            reply, body = await self._read(Stage.DECODE, headers)
        except EngineError:
            if not self._pools[Stage.PREFILL]:
                raise
            reply, body = await self._read(Stage.PREFILL, headers)
        return verbatim(reply.status, body, reply.content_type)

    async def check_model(self, model: str | None, headers: dict[str, str]) -> None:
        """Check that D serves a model. If D does not tell, the stages decide.

        Raises:
            ApiError: it does not.
        """
        if model is not None and await self._served.lacks(model, headers):
            message = f"The model `{model}` does not exist."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def check_client(self, headers: Mapping[str, str]) -> None:
        """Check that the engines would serve a client with these headers.

        Raises:
            RefusalError: decode refuses them.
            EngineError: decode does not tell.
        """
        await self._clients.check(headers)

    async def _served_models(self, headers: dict[str, str]) -> frozenset[str] | None:
        try:
            _, body = await self._read(Stage.DECODE, headers)
            served = msgspec.json.decode(body, type=_ModelList)
        except (EngineError, ValueError, RecursionError):  # an error's body is not a list either
            return None
        return frozenset(model.id for model in served.data)

    async def _read(self, stage: Stage, headers: Mapping[str, str]) -> tuple[Reply, bytes]:
        """Ask one engine for its models, and further engines if it is slow or fails."""
        engines = self._pools[stage].ranked(_MAX_LISTS)
        asked = [partial(self._read_from, stage, engine, headers) for engine in engines]
        return await hedged(asked, _HEDGE_S)

    async def _read_from(
        self, stage: Stage, engine: Engine, headers: Mapping[str, str]
    ) -> tuple[Reply, bytes]:
        limits = TimeLimits(_TIMEOUT_S)
        async with self._relay.call(engine, MODELS, None, headers, limits) as reply:
            body = await reply.read()
        if reply.failed:
            raise EngineError(stage, f"HTTP {reply.status}", reached=True)
        return reply, body

    async def _ask_about_client(self, headers: Mapping[str, str]) -> None:
        reply, body = await self._read(Stage.DECODE, headers)
        if reply.status in (401, 403):
            raise RefusalError(reply.status, body, reply.content_type)
        if reply.status != 200:
            reason = f"{MODELS} is HTTP {reply.status}, which says nothing of the client"
            raise EngineError(Stage.DECODE, reason, reached=True)
