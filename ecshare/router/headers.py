# SPDX-License-Identifier: Apache-2.0
"""Which of a client's headers engines get, and which of an engine's the client gets. Pure."""

import re
from collections.abc import Iterable, Mapping

from multidict import CIMultiDictProxy

from ecshare.router.errors import ApiError
from ecshare.store.integrity import TOKEN_HEADER

FORWARDED = (
    "Authorization",
    "traceparent",
    "tracestate",
    "baggage",
    "X-Session-ID",
    "X-Vllm-Priority",
    "endpoint-load-metrics-format",
)
"""What vLLM reads from clients, but for X-data-parallel-rank: the router chooses the engine, and a
rank would name a part of whichever it is."""
_RETURNED = ("Retry-After", "endpoint-load-metrics")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
# They belong to a connection or to a body, and the router makes its own.
_OWN = frozenset((
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type",
    "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization",
    "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "x-request-id",
    TOKEN_HEADER.lower(),
))  # fmt: skip


def may_be_forwarded(name: str) -> bool:
    """Tell whether an operator may have this header of clients sent to engines."""
    return _TOKEN.fullmatch(name) is not None and name.lower() not in _OWN


def forwarded(headers: CIMultiDictProxy[str], more: Iterable[str]) -> dict[str, str]:
    """Return the headers that engines get; `more` names headers besides vLLM's own.

    A header that is given several times becomes one list, but for the credential: a gateway before
    the router may have checked another one than the engines would.

    Raises:
        ApiError: one cannot be forwarded; names it.
    """
    sent = {
        name: ", ".join(headers.getall(name)) for name in (*FORWARDED, *more) if name in headers
    }
    if len(headers.getall("Authorization", ())) > 1:
        raise ApiError(400, "There are several `Authorization` headers; send one.")
    for name, value in sent.items():
        try:
            value.encode()  # aiohttp reads bytes that are no UTF-8 as lone surrogates
        except UnicodeEncodeError as exc:
            raise ApiError(400, f"The header `{name}` is not UTF-8 text.") from exc
    return sent


def returned(headers: Mapping[str, str]) -> dict[str, str]:
    """Return those of an engine's headers that the client gets, besides its Content-Type."""
    return {name: headers[name] for name in _RETURNED if name in headers}
