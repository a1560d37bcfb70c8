# SPDX-License-Identifier: Apache-2.0
"""Which of a client's headers engines get, and which of an engine's the client gets. Pure."""

import re
from collections.abc import Iterable, Mapping
from random import getrandbits

from multidict import CIMultiDictProxy

from ecshare.router.api.errors import ApiError

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
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RETURNED = ("Retry-After", "endpoint-load-metrics")


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


def request_id(headers: Mapping[str, str]) -> str:
    """Return the id that the client gives its request, a new one if it is not safe in headers and
    logs.
    """
    given = headers.get("x-request-id")
    return given if given and _REQUEST_ID.fullmatch(given) else f"{getrandbits(128):032x}"


def returned(headers: Mapping[str, str]) -> dict[str, str]:
    """Return those of an engine's headers that the client gets, besides its Content-Type.

    `headers` have lower-case names.
    """
    return {name: headers[low] for name in _RETURNED if (low := name.lower()) in headers}
