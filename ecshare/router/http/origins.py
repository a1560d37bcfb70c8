# SPDX-License-Identifier: Apache-2.0
"""Which web pages' scripts may read answers (CORS), as vLLM's --allowed-origins has it."""

from aiohttp import hdrs, web

from ecshare.router.api.errors import ApiError
from ecshare.router.options.values import ANY_ORIGIN

_METHODS = "GET, POST, HEAD, OPTIONS"
_KEPT_S = "600"


class Origins:
    """The origins that are allowed: none, some, or any. Credentials of browsers are not."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = frozenset(allowed)

    def answer_preflight(self, http: web.Request) -> web.Response | None:
        """Return the answer to a browser that asks what it may send; None: it asks something else.

        Raises:
            ApiError: its page's origin is not allowed.
        """
        asked = http.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if http.method != hdrs.METH_OPTIONS or asked is None or hdrs.ORIGIN not in http.headers:
            return None
        if self._shown(http) is None:
            message = "Pages of this origin may not ask: --allow-origin does not name it."
            raise ApiError(400, message, code="origin_not_allowed")
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
            hdrs.ACCESS_CONTROL_MAX_AGE: _KEPT_S,
        }
        wanted = http.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS)
        if wanted is not None:
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
        return web.Response(text="OK", headers=headers)

    async def mark(self, http: web.Request, response: web.StreamResponse) -> None:
        """Mark an answer, before it is sent, as one that the page may read."""
        shown = self._shown(http)
        if shown is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = shown
        if self._allowed and ANY_ORIGIN not in self._allowed:
            response.headers[hdrs.VARY] = hdrs.ORIGIN  # a cache must not mix them up

    def _shown(self, http: web.Request) -> str | None:
        origin = http.headers.get(hdrs.ORIGIN)
        if origin is None:
            return None
        if ANY_ORIGIN in self._allowed:
            return ANY_ORIGIN
        return origin if origin in self._allowed else None
