# SPDX-License-Identifier: Apache-2.0
"""Encode: E encodes each distinct media item, unless it has reported it before."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ecshare.router.api.chat import CHAT
from ecshare.router.api.client_request import EC_PARAMS, ClientRequest, Media, Request
from ecshare.router.fleet.client import EngineClient
from ecshare.router.fleet.retries import Attempt, Retries
from ecshare.router.http.context import RequestContext
from ecshare.router.options.config import RouterConfig
from ecshare.router.siblings import Siblings
from ecshare.router.stages import plan
from ecshare.router.stages.encoded import EncodedMedia, Reports
from ecshare.router.stages.limits import Slot, StageLimits
from ecshare.router.stages.work import item_work
from ecshare.router.types import Stage, Work

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
        options = plan.encoding_options(self.request_for(client) or client)
        return lambda uuid: self.index.knows(plan.encoding_key(options, uuid))

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
            held.uuid: item_work(keys[held.uuid], item, client.model)
            for item, held in zip(client.items, media, strict=True)
        }
        limited = self._limits.slot(Stage.ENCODE, client.model)
        with context.timed(Stage.ENCODE), limited as slot:
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
    ) -> plan.Metadata | None:
        """Have E encode one item; add what it announces."""
        slot.take()
        payload = context.payload(request, work)

        async def ask(attempt: Attempt) -> Request:
            return await self._client.ask(context, attempt.engine, payload, CHAT)

        answer = await self._retries.run(Stage.ENCODE, ask, context, work)
        announced.update(plan.announced_media(answer))
        return plan.reported_metadata(answer)


def _keys(client: ClientRequest, media: Sequence[Media]) -> dict[str, bytes]:
    options = plan.encoding_options(client)
    return {held.uuid: plan.encoding_key(options, held.uuid) for held in media}
