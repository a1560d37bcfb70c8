# SPDX-License-Identifier: Apache-2.0
"""The operator's own port: engines are listed, added, drained and removed while the router runs."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from msgspec import Struct

from ecshare.router.bodies import check_content_type
from ecshare.router.config import AdminConfig, RouterConfig
from ecshare.router.connections import Runner
from ecshare.router.engine_urls import BY_NAME, engine_url
from ecshare.router.engines import Engine, EnginePool, Stage
from ecshare.router.errors import ApiError
from ecshare.router.fleet import FleetWatch, Models
from ecshare.router.middleware import json_response, request_middleware
from ecshare.router.probes import engine_state
from ecshare.router.roster import ChangeError
from ecshare.router.secret import Secret

ENGINES = "/engines"

_MAX_BODY_BYTES = 64 * 1024
_MAX_CONNECTIONS = 16

T = TypeVar("T", bound=Struct)


class _Added(Struct, forbid_unknown_fields=True):
    stage: Stage
    url: str
    models: Models | None = None


class _Named(Struct, forbid_unknown_fields=True):
    url: str


class Admin:
    """The routes. Belongs to the event loop's thread."""

    def __init__(self, pools: Mapping[Stage, EnginePool], fleet: FleetWatch) -> None:
        self._pools = pools
        self._fleet = fleet

    def application(self, config: RouterConfig, key: Secret) -> web.Application:
        """Return the web application. It answers only those who send the key."""
        own = msgspec.structs.replace(
            config, max_body_bytes=_MAX_BODY_BYTES, allow_origins=(), forward_headers=()
        )
        app = web.Application(
            middlewares=[request_middleware(own), _only_with(key)], client_max_size=_MAX_BODY_BYTES
        )
        app.router.add_get(ENGINES, self.engines)
        app.router.add_post(ENGINES, self.add)
        app.router.add_post(ENGINES + "/drain", self.drain)
        app.router.add_post(ENGINES + "/remove", self.remove)
        app.on_response_prepare.append(_name_the_scheme)
        return app

    async def engines(self, http: web.Request) -> web.Response:
        """List all engines."""
        told = [self._told(stage, each) for stage, pool in self._pools.items() for each in pool]
        return json_response(200, {"engines": told})

    async def add(self, http: web.Request) -> web.Response:
        """Have an engine get requests: a new one, or one that is drained or removed."""
        order = await _order(http, _Added)
        url, models = _url(order.url), order.models
        try:
            self._fleet.add(order.stage, url, None if models is None else frozenset(models))
        except ChangeError as exc:
            raise _refusal(exc) from exc
        return json_response(200, self._told_of(order.stage, url))

    async def drain(self, http: web.Request) -> web.Response:
        """Have an engine get no more requests. It is drained when its last one has ended."""
        url = _url((await _order(http, _Named)).url)
        try:
            stage = self._fleet.drain(url)
        except ChangeError as exc:
            raise _refusal(exc) from exc
        return json_response(200, self._told_of(stage, url))

    async def remove(self, http: web.Request) -> web.Response:
        """Forget an engine. It finishes what it has."""
        url = _url((await _order(http, _Named)).url)
        try:
            stage = self._fleet.remove(url)
        except ChangeError as exc:
            raise _refusal(exc) from exc
        return json_response(200, {"stage": stage, "url": url, "state": "removed"})

    def _told_of(self, stage: Stage, url: str) -> dict[str, Any]:
        return next(self._told(stage, each) for each in self._pools[stage] if each.url == url)

    def _told(self, stage: Stage, engine: Engine) -> dict[str, Any]:
        return {"stage": stage, **engine_state(stage, self._pools[stage], engine)}


def make_admin_runner(admin: Admin, config: RouterConfig, own: AdminConfig) -> Runner:
    """Return the server of the port; it does not listen yet."""
    return Runner(
        admin.application(config, own.key),
        config.client_timeout_s,
        _MAX_CONNECTIONS,
        access_log=None,
        shutdown_timeout=1.0,
    )


def _only_with(key: Secret) -> Any:
    @web.middleware
    async def middleware(http: web.Request, handler: Handler) -> web.StreamResponse:
        if not key.matches(http.headers.get(hdrs.AUTHORIZATION)):
            message = "This port needs the router's --admin-key, as Authorization: Bearer KEY."
            raise ApiError(401, message, code="admin_key_needed")
        return await handler(http)

    return middleware


async def _name_the_scheme(http: web.Request, response: web.StreamResponse) -> None:
    if response.status == 401:
        response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"


async def _order(http: web.Request, kind: type[T]) -> T:
    """Return what the body orders.

    Raises:
        ApiError: it is malformed; names the field at fault.
    """
    check_content_type(http)
    try:
        return msgspec.json.decode(await http.read(), type=kind)
    except (ValueError, RecursionError) as exc:
        raise ApiError(400, f"The body is not an order: {exc}.") from exc


def _url(text: str) -> str:
    if text.startswith(BY_NAME):
        message = f"`url`: {BY_NAME} urls are for the command line and the file of engines."
        raise ApiError(400, message, param="url")
    try:
        return engine_url(text)
    except ValueError as exc:
        raise ApiError(400, f"`url`: {exc}.", param="url") from exc


def _refusal(error: ChangeError) -> ApiError:
    message = f"`{error.field}`: {error.reason}."
    if not error.is_known:
        return ApiError(404, message, param=error.field, code="engine_not_found")
    return ApiError(409, message, param=error.field, code="engine_conflict")
