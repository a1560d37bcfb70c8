# SPDX-License-Identifier: Apache-2.0
"""`/live`, `/ready` and `/status`: what process managers and operators ask."""

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import hdrs, web

from ecshare.router.api.errors import ApiError
from ecshare.router.fleet.engines import Engine
from ecshare.router.http.responses import json_response
from ecshare.router.options.secret import Secret


class Probes:
    """The routes."""

    def __init__(
        self,
        key: Secret | None,
        status: Callable[[], Awaitable[dict[str, Any]]],
        obstacle: Callable[[], Awaitable[str | None]],
    ) -> None:
        """`status` is what holders of the status key are told; `obstacle`: why no request can be
        answered now, None if one can.
        """
        self._key = key
        self._status = status
        self._obstacle = obstacle

    async def live(self, http: web.Request) -> web.Response:
        """Answer 200 as long as the process serves: a restart would not help otherwise."""
        return json_response(200, {"status": "live"})

    async def ready(self, http: web.Request) -> web.Response:
        """Answer 200 if a request could be answered now, else 503 with the reason."""
        obstacle = await self._obstacle()
        if obstacle is None:
            return json_response(200, {"status": "ready"})
        return json_response(503, {"status": "not ready", "reason": obstacle})

    async def status(self, http: web.Request) -> web.Response:
        """Return what the router knows. It asks no engine."""
        if self._key is None or not self._key.matches(http.headers.get(hdrs.AUTHORIZATION)):
            message = "/status needs the router's --status-key, as Authorization: Bearer KEY."
            raise ApiError(401, message, code="status_key_needed")
        return json_response(200, await self._status())


def engine_state(engine: Engine) -> dict[str, Any]:
    """Return what is known of an engine."""
    return {
        "name": engine.name,
        "url": engine.url,
        "state": engine.state,
        "models": None if engine.models is None else sorted(engine.models),
        "in_flight": engine.in_flight,
        "tokens": engine.tokens,
    }
