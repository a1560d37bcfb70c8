# SPDX-License-Identifier: Apache-2.0
"""Makes the requests for a sample to each kind of server, and reads its answers; pure."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from ecshare.router.api.chat import CHAT
from ecshare.router.api.client_request import (
    EC_PARAMS,
    KV_PARAMS,
    SAVE_OPTIONS,
    ClientRequest,
    Media,
    Request,
)
from ecshare.router.stages import plan
from ecshare.warm.corpus import WarmError

_PATH_HEADER, _AVOIDED_HEADER = "x-ecshare-path", "x-ecshare-avoided"
# The largest block: of a stored prompt, an engine computes at most the last block again.
_BLOCK_TOKENS = 128


class Outcome(StrEnum):
    """The outcome for a medium or a request."""

    NEW = "new"
    THERE = "there already"
    REPEATED = "repeated"
    """The corpus contains it a second time."""
    FAILED = "failed"
    OTHER = "not sent"
    """A file that is not a medium, or a request without media."""


class ServerRequest(NamedTuple):
    """One request to a server."""

    path: str
    body: Request
    uuid: str
    """The name of its only medium; "": the request is for more."""


class ServerKind(Protocol):
    """One kind of server."""

    loads_media: bool
    """Whether this host reads or downloads media, and names them."""
    needs_media: bool
    """Whether requests without media are not sent."""

    def requests(self, client: ClientRequest, media: Sequence[Media]) -> list[ServerRequest]:
        """Return the requests to send. `media` is empty unless this `loads_media`."""

    def outcome(self, answer: Request, headers: Mapping[str, str]) -> Outcome:
        """Return the outcome that an answer with status 200 reports.

        Raises:
            WarmError: nothing is stored; says why.
        """


class EncodeEngine:
    """An encode engine, which gets the requests of the router."""

    loads_media = needs_media = True

    def requests(self, client: ClientRequest, media: Sequence[Media]) -> list[ServerRequest]:
        """Return one request for each distinct medium."""
        requests = plan.encode_requests(client, media)
        return [ServerRequest(CHAT, request, uuid) for uuid, request in requests.items()]

    def outcome(self, answer: Request, headers: Mapping[str, str]) -> Outcome:
        """See `ServerKind`. An engine announces all embeddings that are, or will be, stored."""
        reports = [each for each in plan.announced_media(answer).values() if isinstance(each, dict)]
        if not reports:
            raise WarmError(
                "the engine announces no embedding: it has no ECShareConnector that saves, or it "
                "could not store it"
            )
        is_stored = all(report.get("stored") is True for report in reports)
        return Outcome.THERE if is_stored else Outcome.NEW


class PrefillEngine:
    """A prefill engine, which gets the requests of the router."""

    loads_media, needs_media = True, False

    def requests(self, client: ClientRequest, media: Sequence[Media]) -> list[ServerRequest]:
        """Return the prompt, for one token."""
        inline = plan.inline_request(client, media)
        request = plan.prefill_request(client.endpoint, inline)
        return [ServerRequest(client.endpoint.path, request, "")]

    def outcome(self, answer: Request, headers: Mapping[str, str]) -> Outcome:
        """See `ServerKind`."""
        if plan.reported_hand_over(answer) is None:
            raise WarmError("the engine hands nothing over: it has no KVShareConnector that saves")
        return _of_tokens(answer)


class ChatServer:
    """A router or an engine that serves clients, and gets the requests that clients would send."""

    loads_media = False

    def __init__(self, *, kv: bool) -> None:
        """`kv`: whether to store KV too."""
        self.needs_media = not kv
        self._kv = kv

    def requests(self, client: ClientRequest, media: Sequence[Media]) -> list[ServerRequest]:
        """Return the client's request, for one token."""
        request = plan.prefill_request(client.endpoint, client.request)
        request[KV_PARAMS] = {SAVE_OPTIONS[KV_PARAMS]: self._kv}
        if client.items:
            request[EC_PARAMS] = {SAVE_OPTIONS[EC_PARAMS]: True}
        return [ServerRequest(client.endpoint.path, request, "")]

    def outcome(self, answer: Request, headers: Mapping[str, str]) -> Outcome:
        """See `ServerKind`. A router reports which stages served the request."""
        path, avoided = headers.get(_PATH_HEADER), headers.get(_AVOIDED_HEADER, "").split(",")
        if path is None:
            return _of_tokens(answer) if self._kv else Outcome.NEW
        stage = "prefill" if self._kv else "encode"
        if stage in path.split(","):
            return _of_tokens(answer) if self._kv else Outcome.NEW
        if stage not in avoided:
            raise WarmError(f"no {stage} engine has worked for it; the router's log says why")
        return Outcome.THERE


def _of_tokens(answer: Request) -> Outcome:
    """Return the outcome that the usage of an answer reports. Without usage: new."""
    tokens = plan.prompt_tokens(answer)
    if tokens is None or not tokens.cached:
        return Outcome.NEW
    return Outcome.THERE if tokens.total - tokens.cached <= _BLOCK_TOKENS else Outcome.NEW
