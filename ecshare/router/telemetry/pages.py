# SPDX-License-Identifier: Apache-2.0
"""What the router tells those who run it: its metrics, and a dashboard."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import hdrs, web

from ecshare.router.api.errors import ApiError
from ecshare.router.http.context import CONTEXT
from ecshare.router.http.responses import json_response
from ecshare.router.options.secret import Secret
from ecshare.router.telemetry.dashboard import page, page_headers
from ecshare.router.telemetry.metrics import RouterMetrics, Sources
from ecshare.router.telemetry.recent import RecentRequests

Page = Callable[[web.Request], Awaitable[web.StreamResponse]]
Stages = Callable[[], Awaitable[dict[str, Any]]]
"""Returns all that is known of the engines, by stage."""

_NO_KEY = "The router was started without --status-key, and shows nothing here."
_WRONG_KEY = "That is not the status key, sent as Authorization: Bearer KEY."


class Pages:
    """The pages for operators. Belongs to the event loop's thread."""

    def __init__(
        self,
        key: Secret | None,
        sources: Sources,
        metrics: RouterMetrics,
        recent: RecentRequests,
        stages: Stages,
    ) -> None:
        self._key = key
        self._sources = sources
        self._metrics = metrics
        self._recent = recent
        self._stages = stages

    def routes(self) -> Mapping[str, Page]:
        """Return the pages, by path."""
        return {
            "/metrics": self.metrics,
            "/dashboard": self.dashboard,
            "/dashboard/data": self.dashboard_data,
        }

    async def metrics(self, http: web.Request) -> web.StreamResponse:
        """Answer with the metrics in Prometheus's format.

        If there is a status key, only those who send it get them, and engines' urls are among them.
        """
        if self._key is not None and not self._is_shown(http):
            return _refused(http, _WRONG_KEY)
        body, content_type = self._metrics.exposed(http.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    async def dashboard(self, http: web.Request) -> web.StreamResponse:
        """Answer with the page, which holds no data."""
        return web.Response(text=page(), headers=page_headers())

    async def dashboard_data(self, http: web.Request) -> web.StreamResponse:
        """Answer with what the page shows, to those who send the status key."""
        if not self._is_shown(http):
            return _refused(http, _NO_KEY if self._key is None else _WRONG_KEY)
        told = {
            "stages": await self._stages(),
            "counts": self._sources.counts(),
            "in_flight_bytes": self._sources.memory.used_bytes,
            "in_flight_limit_bytes": self._sources.memory.limit_bytes,
            "requests": self._recent.shown(),
        }
        response = json_response(200, told)
        response.headers[hdrs.CACHE_CONTROL] = "no-store"
        return response

    def _is_shown(self, http: web.Request) -> bool:
        """Tell whether the request carries the status key."""
        return self._key is not None and self._key.matches(http.headers.get(hdrs.AUTHORIZATION))


def _refused(http: web.Request, reason: str) -> web.Response:
    error = ApiError(401, reason, code="status_key_needed")
    http[CONTEXT].error = error.kind
    response = json_response(error.status, error.body())
    response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    return response
