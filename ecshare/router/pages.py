# SPDX-License-Identifier: Apache-2.0
"""What the router tells those who run it: its metrics."""

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import hdrs, web

from ecshare.router.errors import ApiError
from ecshare.router.metrics import RouterMetrics
from ecshare.router.middleware import CONTEXT, json_response
from ecshare.router.secret import Secret

Page = Callable[[web.Request], Awaitable[web.StreamResponse]]

_WRONG_KEY = "That is not the status key, sent as Authorization: Bearer KEY."


class Pages:
    """The pages for operators. Belongs to the event loop's thread."""

    def __init__(self, key: Secret | None, metrics: RouterMetrics) -> None:
        self._key = key
        self._metrics = metrics

    def routes(self) -> Mapping[str, Page]:
        """Return the pages, by path."""
        return {"/metrics": self.metrics}

    async def metrics(self, http: web.Request) -> web.StreamResponse:
        """Answer with the metrics in Prometheus's format.

        If there is a status key, only those who send it get them, and engines' urls are among them.
        """
        if self._key is not None and not self._is_shown(http):
            return _refused(http, _WRONG_KEY)
        body, content_type = self._metrics.exposed(http.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    def _is_shown(self, http: web.Request) -> bool:
        """Tell whether the request carries the status key."""
        return self._key is not None and self._key.matches(http.headers.get(hdrs.AUTHORIZATION))


def _refused(http: web.Request, reason: str) -> web.Response:
    error = ApiError(401, reason, code="status_key_needed")
    http[CONTEXT].error = error.kind
    response = json_response(error.status, error.body())
    response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    return response
