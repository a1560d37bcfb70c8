# SPDX-License-Identifier: Apache-2.0
"""What the router tells those who run it: metrics, its state, and a dashboard."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import hdrs, web

from ecshare.router.api.errors import ApiError
from ecshare.router.http.context import CONTEXT
from ecshare.router.http.responses import json_response
from ecshare.router.options.secret import Secret
from ecshare.router.siblings import Siblings
from ecshare.router.telemetry.dashboard import page, page_headers
from ecshare.router.telemetry.merging import by_worker
from ecshare.router.telemetry.metrics import RouterMetrics
from ecshare.router.telemetry.recent import RecentRequests

Page = Callable[[web.Request], Awaitable[web.StreamResponse]]
Ask = Callable[[], Awaitable[Mapping[str, Any]]]

_MAX_REQUESTS = 100
_NO_KEY = "The router was started without --status-key, and shows nothing here."
_WRONG_KEY = "That is not the status key, sent as Authorization: Bearer KEY."


class Pages:
    """The pages for operators. Belongs to the event loop's thread."""

    def __init__(  # noqa: PLR0913 - all that is shown
        self,
        key: Secret | None,
        metrics: RouterMetrics,
        recent: RecentRequests,
        siblings: Siblings,
        known: Ask,
        checked: Ask,
    ) -> None:
        """`known` returns what all workers know, `checked` does so after it has asked all
        engines.
        """
        self._key = key
        self._metrics = metrics
        self._recent = recent
        self._siblings = siblings
        self._known = known
        self._checked = checked
        siblings.answer("metrics", lambda accept: metrics.exposed(accept)[0])
        siblings.answer("requests", lambda _: msgspec.json.encode(recent.shown()))

    def routes(self) -> Mapping[str, Page]:
        """Return the pages, by path."""
        return {
            "/metrics": self._show_metrics,
            "/status": self._show_status,
            "/dashboard": self._show_dashboard,
            "/dashboard/data": self._show_dashboard_data,
        }

    async def _show_metrics(self, http: web.Request) -> web.StreamResponse:
        """Answer with the metrics in Prometheus's format.

        If there is a status key, only those who send it get them, and engines' urls are among them.
        """
        if self._key is not None and not shows_key(self._key, http):
            return self._refused(http)
        accept = " ".join(http.headers.get(hdrs.ACCEPT, "").split())
        body, content_type = self._metrics.exposed(accept)
        if self._siblings.are_there:
            theirs = await self._siblings.ask("metrics", accept)
            body = by_worker({self._siblings.number: body, **dict(theirs)})
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    async def _show_status(self, http: web.Request) -> web.StreamResponse:
        """Answer with what the router knows, to those who send the status key. No engine is
        asked.
        """
        if not shows_key(self._key, http):
            return self._refused(http)
        known = await self._known()
        told = {
            "draining": known["draining"],
            "in_flight": known["in_flight"],
            "stages": {
                stage: {"in_flight": known["used"][stage], "engines": engines}
                for stage, engines in known["engines"].items()
            },
            "memory": known["memory"],
            **known["counts"],
        }
        return json_response(200, told)

    async def _show_dashboard(self, http: web.Request) -> web.StreamResponse:
        """Answer with the page, which holds no data."""
        return web.Response(text=page(), headers=page_headers())

    async def _show_dashboard_data(self, http: web.Request) -> web.StreamResponse:
        """Answer with what the page shows, to those who send the status key."""
        if not shows_key(self._key, http):
            return self._refused(http)
        known = await self._checked()
        requests = self._recent.shown()
        for _, theirs in await self._siblings.ask("requests"):
            requests += msgspec.json.decode(theirs)
        told = {
            "stages": known["engines"],
            "counts": known["counts"],
            "in_flight_bytes": known["memory"],
            "in_flight_limit_bytes": known["memory_limit"],
            "requests": sorted(requests, key=lambda each: -each["at_s"])[:_MAX_REQUESTS],
        }
        response = json_response(200, told)
        response.headers[hdrs.CACHE_CONTROL] = "no-store"
        return response

    def _refused(self, http: web.Request) -> web.Response:
        reason = _NO_KEY if self._key is None else _WRONG_KEY
        error = ApiError(401, reason, code="status_key_needed")
        http[CONTEXT].error = error.kind
        response = json_response(error.status, error.body())
        response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
        return response


def shows_key(key: Secret | None, http: web.Request) -> bool:
    """Return whether a request carries the status key."""
    return key is not None and key.matches(http.headers.get(hdrs.AUTHORIZATION))
