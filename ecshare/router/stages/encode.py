# SPDX-License-Identifier: Apache-2.0
"""Encode: E encodes each distinct media item, unless it has reported it before."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec import Struct

from ecshare.router.api.chat import CHAT
from ecshare.router.api.client_request import EC_PARAMS, ClientRequest, Media, Request
from ecshare.router.api.errors import EngineError
from ecshare.router.fleet.client import EngineClient
from ecshare.router.fleet.retries import Attempt, Retries
from ecshare.router.http.bodies import Payload
from ecshare.router.http.context import RequestContext
from ecshare.router.options.config import RouterConfig
from ecshare.router.reuse import KEPT_S, ON_ITS_WAY_S, ReportIndex, SingleFlight
from ecshare.router.siblings import Siblings
from ecshare.router.stages import plan
from ecshare.router.stages.limits import Slot, StageLimits
from ecshare.router.stages.plan import Metadata
from ecshare.router.types import Stage, Work
from ecshare.store.threads import gather_all

_ENTRY_BYTES = 500
"""Memory of one entry besides its JSON, roughly."""

Ask = Callable[[], Awaitable[Metadata | None]]


class Reports(Struct, frozen=True):
    """What is known of the items of one request."""

    metadata: dict[str, Metadata | None]
    """By uuid; None: the item must be sent whole."""
    known: frozenset[str]
    """The uuids that E was not asked for: the embedding may be gone meanwhile."""
    was_asked: bool
    """Whether E was asked for one now, by this request or by one that it waited for."""


class _Report(Struct, array_like=True):
    """What E has reported of an item, and when."""

    json: bytes
    since_s: float

    def num_bytes(self) -> int:
        """Return how much memory it takes, about."""
        return len(self.json) + _ENTRY_BYTES


class EncodedMedia:
    """A bounded index of E's reports, shared by all requests. Belongs to the event loop's thread.

    A key stands for all that a report depends on.
    """

    def __init__(
        self,
        max_bytes: int,
        patience_s: float,
        siblings: Siblings,
        clock_s: Callable[[], float],
    ) -> None:
        """`patience_s`: how long a request waits for E's answer to another one at most."""
        self._index = ReportIndex("encoded", _Report, _Report.num_bytes, max_bytes, siblings)
        self._clock_s = clock_s
        self._asking: SingleFlight[bytes, tuple[Metadata | None, bool]] = SingleFlight()
        self._patience_s = patience_s
        self._num_asked = 0
        self._num_avoided = 0

    async def reports(self, keys: Mapping[str, bytes], asks: Mapping[str, Ask]) -> Reports:
        """Return the reports of items, by uuid: from the index, else from E.

        `keys` and `asks` have the same uuids. An ask sends one item to E. Items that other requests
        are asking for now are waited for.

        Raises:
            Exception: what an ask raises; the others are cancelled.
        """
        known = self.known(keys)
        unknown = [uuid for uuid in keys if uuid not in known]
        answers = await gather_all([self._report(keys[uuid], asks[uuid]) for uuid in unknown])
        self._num_avoided += len(known)
        found = dict(zip(unknown, answers, strict=True))
        metadata = {**known, **{uuid: report for uuid, (report, _) in found.items()}}
        shared = [uuid for uuid, (_, is_shared) in found.items() if is_shared]
        return Reports(metadata, frozenset(known).union(shared), len(shared) < len(found))

    def knows(self, key: bytes) -> bool:
        """Tell whether the report under a key is in the index."""
        return self._json(key) is not None

    def were_stored(self, keys: Iterable[bytes]) -> bool:
        """Tell whether the embeddings of these known reports are stored or lost: none is on its
        way."""
        since_s = self._clock_s() - ON_ITS_WAY_S
        reports = (self._index.get(key) for key in keys)
        return all(report is not None and report.since_s <= since_s for report in reports)

    def avoided(self, known: dict[str, Metadata]) -> Reports:
        """Return what was found by `known`, and count it: E need not be asked for any of it."""
        self._num_avoided += len(known)
        return Reports({**known}, frozenset(known), was_asked=False)

    def known(self, keys: Mapping[str, bytes]) -> dict[str, Metadata]:
        """Return the reports that are in the index, by uuid."""
        found = {uuid: self._json(key) for uuid, key in keys.items()}
        return {uuid: msgspec.json.decode(json) for uuid, json in found.items() if json is not None}

    @contextmanager
    def doubted(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Have E asked for these in the block. If an engine fails in the block, what E has not
        reported again is as known as it was before.
        """
        known = {key: self._index.get(key) for key in keys}
        for key in known:
            self._index.forget(key)
        try:
            yield
        except EngineError:
            for key, report in known.items():
                if report is not None and key not in self._index:
                    self._index.remember(key, report)
            raise

    def status(self) -> dict[str, int]:
        """Return counts for the status page."""
        return {
            "asked": self._num_asked,
            "avoided": self._num_avoided,
            "waiting": self._asking.num_waiting,
            **self._index.status(),
        }

    def _json(self, key: bytes) -> bytes | None:
        report = self._index.get(key)
        if report is None or self._clock_s() - report.since_s >= KEPT_S:
            return None
        return report.json

    async def _report(self, key: bytes, ask: Ask) -> tuple[Metadata | None, bool]:
        """Return a report that was not in the index, and whether E was not asked for it here."""
        has_asked = False

        async def found() -> tuple[Metadata | None, bool]:
            nonlocal has_asked
            # Another request's report may have come since this one looked.
            if (json := self._json(key)) is not None:
                return msgspec.json.decode(json), True
            has_asked = True
            self._num_asked += 1
            metadata = await ask()
            if metadata is not None:  # else nobody knows whether it is stored
                self._index.remember(key, _Report(msgspec.json.encode(metadata), self._clock_s()))
            return metadata, False

        report = await self._asking.run(key, found, self._patience_s)
        self._num_avoided += not has_asked
        return report


Complete = Callable[[RequestContext, list[Media]], Awaitable[list[Media]]]
"""Returns media with the bytes of those that had none; their uuids may then be others."""


class Encoded(NamedTuple):
    """A request whose media E has encoded, now or before."""

    request: Request
    """To P and D."""
    media: list[Media]
    keys: tuple[bytes, ...]
    """Of the reports without which the request cannot be answered."""
    was_known: bool
    """Whether E was not asked for one of them."""


class Encode:
    """Asks encode engines. Belongs to the event loop's thread."""

    def __init__(  # noqa: PLR0913 — the parts that all stages share
        self,
        config: RouterConfig,
        client: EngineClient,
        retries: Retries,
        limits: StageLimits,
        siblings: Siblings,
        clock_s: Callable[[], float],
    ) -> None:
        self._pools = client.pools
        self._client = client
        self._retries = retries
        self._limits = limits
        self._takes_adapters_as_base = config.adapter_encoders == "base"
        self.index = EncodedMedia(config.max_index_bytes, config.stage_timeout_s, siblings, clock_s)

    def request_for(self, client: ClientRequest) -> ClientRequest | None:
        """Return the request that E gets the media of; None: no E serves its model, or its
        embeddings must not be stored.

        An adapter that no E lists may be one that leaves the encoder as it is, if the operator says
        that all do. Then it is a request for its base model.
        """
        model, encoders = client.model, self._pools[Stage.ENCODE]
        if not client.allows(EC_PARAMS):
            return None
        if encoders.serving(model):
            return client
        if model is None or not self._takes_adapters_as_base:
            return None
        base = self._pools[Stage.DECODE].base_of(model)
        return client.for_model(base) if base is not None and encoders.serving(base) else None

    def known_items(self, client: ClientRequest) -> Callable[[str], bool]:
        """Return a function that tells of a uuid whether the request can do without the item's
        bytes: its report is known.
        """
        if not client.endpoint.takes_metadata:
            return lambda _: False

        def is_known(uuid: str) -> bool:  # asked of media at urls alone
            options = plan.encoding_options(self.request_for(client) or client)
            return self.index.knows(plan.encoding_key(options, uuid))

        return is_known

    async def run(
        self, context: RequestContext, client: ClientRequest, media: list[Media], complete: Complete
    ) -> Encoded:
        """Return the request with what E reports of the items or has reported before.

        `client` is the request that E gets the media of. `complete` is called if E gets any, and
        some have no bytes.

        Raises:
            ApiError: an item cannot be fetched that is needed after all.
            EngineError: E failed.
            RefusalError: E refused an item.
        """
        keys, announced = _keys(client, media), Request()
        known = self.index.known(keys)
        if len(known) == len(keys) and not plan.needs_bytes(client, media, known):
            context.avoided.append(Stage.ENCODE)
            reports = self.index.avoided(known)
        else:
            if not all(held.url for held in media):
                media = await complete(context, media)
                keys = _keys(client, media)
            reports = await self._reports(context, client, media, keys, announced)
        known_keys = [keys[uuid] for uuid in reports.known]
        names_all = bool(known_keys) and self.index.were_stored(known_keys)
        request = plan.encoded_request(
            context.client, media, reports.metadata, announced, names_all=names_all
        )
        needed = tuple(keys.values()) if client.endpoint.takes_metadata else ()
        return Encoded(request, media, needed, was_known=bool(needed and reports.known))

    async def _reports(
        self,
        context: RequestContext,
        client: ClientRequest,
        media: list[Media],
        keys: Mapping[str, bytes],
        announced: Request,
    ) -> Reports:
        """Have E encode what it has not reported; add what it announces."""
        requests = plan.encode_requests(client, media)
        works = {
            held.uuid: plan.item_work(keys[held.uuid], item, client.model)
            for item, held in zip(client.items, media, strict=True)
        }
        limited = self._limits.slot(Stage.ENCODE, client.model)
        with limited as slot, context.timed(Stage.ENCODE):
            asks = {
                uuid: partial(self._ask, context, slot, each, works[uuid], announced)
                for uuid, each in requests.items()
            }
            reports = await self.index.reports(keys, asks)
        if not reports.was_asked:
            context.path.remove(Stage.ENCODE)
            context.avoided.append(Stage.ENCODE)
        return reports

    async def _ask(
        self,
        context: RequestContext,
        slot: Slot,
        request: Request,
        work: Work,
        announced: Request,
    ) -> Metadata | None:
        """Have E encode one item; add what it announces."""
        slot.take()
        payload = Payload(context.blobs, request, work)

        async def ask(attempt: Attempt) -> Request:
            return await self._client.ask(context, attempt.engine, payload, CHAT)

        answer = await self._retries.run(Stage.ENCODE, ask, context, work)
        reports = plan.announced_media(answer)
        announced.update(reports)
        context.new_media += plan.new_media(reports)
        return plan.reported_metadata(answer)


def _keys(client: ClientRequest, media: Sequence[Media]) -> dict[str, bytes]:
    options = plan.encoding_options(client)
    return {held.uuid: plan.encoding_key(options, held.uuid) for held in media}
