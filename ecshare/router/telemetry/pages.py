# SPDX-License-Identifier: Apache-2.0
"""What the router tells those who run it: metrics, its state, and a dashboard.

Several workers tell it as one router: metrics by worker, all else added up. Metrics are not added
up: a worker that is started again counts from zero, and Prometheus would take a smaller sum for a
restart of all.

The dashboard's page holds no data: whoever opens it types in the status key, and its script asks
for the data with it. The browser runs that script alone, and lets it talk to this router alone.
"""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import hdrs, web

from ecshare.router.api.errors import ApiError
from ecshare.router.http.context import RequestContext
from ecshare.router.http.dispatch import Handler
from ecshare.router.http.responses import json_response
from ecshare.router.options.values import Secret
from ecshare.router.siblings import Siblings
from ecshare.router.telemetry.metrics import RouterMetrics
from ecshare.router.telemetry.requests import RecentRequests

Ask = Callable[[], Awaitable[Mapping[str, Any]]]

_MAX_REQUESTS = 100
_NO_KEY = "The router was started without --status-key, and shows nothing here."
_WRONG_KEY = "That is not the status key, sent as Authorization: Bearer KEY."
_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)
_SAMPLE = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*")
_END = b"# EOF"


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

    def routes(self) -> Mapping[str, Handler]:
        """Return the pages, by path."""
        return {
            "/metrics": self._show_metrics,
            "/status": self._show_status,
            "/dashboard": self._show_dashboard,
            "/dashboard/data": self._show_dashboard_data,
        }

    async def _show_metrics(self, context: RequestContext) -> web.StreamResponse:
        """Answer with the metrics in Prometheus's format.

        If there is a status key, only those who send it get them, and engines' urls are among them.
        """
        if self._key is not None and not shows_key(self._key, context.http):
            return self._refused(context)
        accept = " ".join(context.http.headers.get(hdrs.ACCEPT, "").split())
        body, content_type = self._metrics.exposed(accept)
        if self._siblings.are_there:
            theirs = await self._siblings.ask("metrics", accept)
            body = by_worker({self._siblings.number: body, **dict(theirs)})
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    async def _show_status(self, context: RequestContext) -> web.StreamResponse:
        """Answer with what the router knows, to those who send the status key. No engine is
        asked.
        """
        if not shows_key(self._key, context.http):
            return self._refused(context)
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

    async def _show_dashboard(self, context: RequestContext) -> web.StreamResponse:
        """Answer with the page, which holds no data."""
        return web.Response(text=page(), headers=page_headers())

    async def _show_dashboard_data(self, context: RequestContext) -> web.StreamResponse:
        """Answer with what the page shows, to those who send the status key."""
        if not shows_key(self._key, context.http):
            return self._refused(context)
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

    def _refused(self, context: RequestContext) -> web.Response:
        reason = _NO_KEY if self._key is None else _WRONG_KEY
        error = ApiError(401, reason, code="status_key_needed")
        context.error = error.kind
        response = json_response(error.status, error.body())
        response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
        return response


def shows_key(key: Secret | None, http: web.BaseRequest) -> bool:
    """Return whether a request carries the status key."""
    return key is not None and key.matches(http.headers.get(hdrs.AUTHORIZATION))


# --- the dashboard's page ---


@cache
def page() -> str:
    """Return the page: HTML with its style and its script in it."""
    return (files("ecshare.router.telemetry") / "dashboard.html").read_text(encoding="utf-8")


@cache
def page_headers() -> dict[str, str]:
    """Return the headers that confine the page, and so whatever might ever get into it."""
    hashes = {kind: _hash(text) for kind, text in _INLINE.findall(page())}
    policy = [
        "default-src 'none'",
        f"style-src {hashes['style']}",
        f"script-src {hashes['script']}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "Content-Security-Policy": "; ".join(policy),
        "Content-Type": "text/html; charset=utf-8",
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


# --- several workers ---


def by_worker(texts: Mapping[int, bytes]) -> bytes:
    """Return the metrics of all workers, each sample with the label `worker`, metric by metric.

    `texts`: by worker, in one of Prometheus's text formats.
    """
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    is_ended = False
    for worker, text in texts.items():
        family = b""
        seen = set(heads)
        for line in text.splitlines():
            if line == _END:
                is_ended = True
            elif line.startswith(b"# "):
                family = line.split(b" ", 3)[2]
                if family not in seen:
                    heads.setdefault(family, []).append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, worker))
    lines = [each for family, head in heads.items() for each in (*head, *samples.get(family, ()))]
    return b"".join(line + b"\n" for line in (*lines, *((_END,) if is_ended else ())))


def _labelled(sample: bytes, worker: int) -> bytes:
    name = _SAMPLE.match(sample)
    if name is None:  # a name in quotes, within the braces
        return sample
    rest = sample[name.end() :]
    label = b'{worker="%d"' % worker
    more = b"," + rest[1:] if rest.startswith(b"{") else b"}" + rest
    return name[0] + label + more


def merged(told: Sequence[Any]) -> Any:
    """Return what several workers tell as what one would tell.

    Numbers are added up, and of booleans any counts. Of lists of engines those with the same url
    are one engine. Other lists of objects are joined. Of all else the first one counts.
    """
    first = told[0]
    if isinstance(first, bool):
        return any(told)
    if isinstance(first, int | float):
        return sum(told)
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for each in told for name in each)
        return {name: merged([each[name] for each in told if name in each]) for name in names}
    if isinstance(first, list):
        items = [item for each in told for item in each]
        if all(isinstance(item, Mapping) for item in items):
            return _joined(items)
    return first


def _joined(items: Sequence[Mapping[str, Any]]) -> list[Any]:
    if not all("url" in item for item in items):
        return list(items)
    groups: dict[str, list[Any]] = {}
    for item in items:
        groups.setdefault(item["url"], []).append(item)
    return [merged(group) for group in groups.values()]
