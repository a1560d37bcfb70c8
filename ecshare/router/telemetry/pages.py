# SPDX-License-Identifier: Apache-2.0
"""What the router tells those who run it: its metrics, and a dashboard."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import hdrs, web

from ecshare.router.api.errors import ApiError
from ecshare.router.http.context import CONTEXT
from ecshare.router.http.responses import json_response
from ecshare.router.options.secret import Secret
from ecshare.router.siblings import Siblings
from ecshare.router.telemetry.dashboard import page, page_headers
from ecshare.router.telemetry.merging import by_worker
from ecshare.router.telemetry.metrics import RouterMetrics

Page = Callable[[web.Request], Awaitable[web.StreamResponse]]
Known = Mapping[str, Any]
"""All that is known of the router and its engines."""

_MAX_REQUESTS = 100
_NO_KEY = "The router was started without --status-key, and shows nothing here."
_WRONG_KEY = "That is not the status key, sent as Authorization: Bearer KEY."


class Pages:
    """The pages for operators. Belongs to the event loop's thread."""

    def __init__(
        self,
        key: Secret | None,
        metrics: RouterMetrics,
        siblings: Siblings,
        known: Callable[[], Awaitable[Known]],
    ) -> None:
        self._key = key
        self._metrics = metrics
        self._siblings = siblings
        self._known = known
        siblings.answer("metrics", lambda accept: metrics.exposed(accept)[0])

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
        accept = " ".join(http.headers.get(hdrs.ACCEPT, "").split())
        body, content_type = self._metrics.exposed(accept)
        if self._siblings.are_there:
            theirs = await self._siblings.ask("metrics", accept)
            body = by_worker({self._siblings.number: body, **dict(theirs)})
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    async def dashboard(self, http: web.Request) -> web.StreamResponse:
        """Answer with the page, which holds no data."""
        return web.Response(text=page(), headers=page_headers())

    async def dashboard_data(self, http: web.Request) -> web.StreamResponse:
        """Answer with what the page shows, to those who send the status key."""
        if not self._is_shown(http):
            return _refused(http, _NO_KEY if self._key is None else _WRONG_KEY)
        known = await self._known()
        latest = sorted(known["requests"], key=lambda each: -each["at_s"])
        told = {
            "stages": known["engines"],
            "counts": known["counts"],
            "in_flight_bytes": known["memory"],
            "in_flight_limit_bytes": known["memory_limit"],
            "requests": latest[:_MAX_REQUESTS],
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
