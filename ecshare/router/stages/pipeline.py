# SPDX-License-Identifier: Apache-2.0
"""The way of a request through the stages.

    take the request in (app) -> load its media -> encode -> prefill -> decode, and answer

E (encode) encodes each distinct item, P (prefill) prefills the conversation, D (decode) answers.
Where an engine fails, another one of its stage is asked (fleet/retries.py); if E or P has none
left, D gets the media and does all three.
"""

import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web

from ecshare.router.api.client_request import Media
from ecshare.router.api.errors import ApiError, EngineError
from ecshare.router.fleet.client import EngineClient
from ecshare.router.fleet.retries import Retries, RetryBudget
from ecshare.router.http.context import Events, RequestContext
from ecshare.router.media.loader import MediaLoader
from ecshare.router.options.config import RouterConfig
from ecshare.router.siblings import Siblings
from ecshare.router.stages import plan
from ecshare.router.stages.decode import LOST_STATUSES, Decode
from ecshare.router.stages.encode import Encode
from ecshare.router.stages.limits import Slot, StageLimits
from ecshare.router.stages.prefill import Prefill, PrefilledPrompts
from ecshare.router.types import Stage

logger = logging.getLogger(__name__)


class Pipeline:
    """Takes requests through the stages. Belongs to the event loop's thread."""

    def __init__(
        self,
        config: RouterConfig,
        client: EngineClient,
        events: Events,
        siblings: Siblings,
        clock_s: Callable[[], float],
    ) -> None:
        self._refuses_overload = config.when_overloaded == "refuse"
        self._events = events
        self.media = MediaLoader(config)
        self.limits = StageLimits(
            client.pools,
            {
                Stage.ENCODE: config.max_encodes,
                Stage.PREFILL: config.max_prefills,
                Stage.DECODE: config.max_decodes,
            },
        )
        self.retry_budget = RetryBudget(config.retry_share, clock_s)
        keeps_affinity = config.balance == "affinity"
        retries = Retries(client.pools, self.retry_budget, events, keeps_affinity=keeps_affinity)
        prompts = PrefilledPrompts(config.max_index_bytes, config.max_new_tokens, clock_s, siblings)
        self._encode = Encode(config, client, retries, self.limits, siblings, clock_s)
        self._decode = Decode(config, client, retries)
        self._prefill = Prefill(config, client, retries, self.limits, self._decode, prompts)
        self._counts = {"fallbacks": 0, "repeated": 0}

    async def close(self) -> None:
        """End all downloads."""
        await self.media.close()

    def counts(self) -> dict[str, Any]:
        """Return what was counted since the start. docs/metrics.md explains it."""
        return {
            "answered": dict(self._decode.paths),
            "fallbacks": self._counts["fallbacks"],
            "retries": self.retry_budget.status(),
            "encodes": self._encode.index.status() | {"repeated": self._counts["repeated"]},
            "prefills": self._prefill.index.status(),
            "downloads": self.media.status(),
        }

    async def answer(self, context: RequestContext) -> web.StreamResponse:
        """Answer a request that has been read.

        Raises:
            ApiError: an item cannot be had.
            EngineError: the stages failed, or have too much to do.
            RefusalError: a stage refused the request.
        """
        # Every request ends at D. One that D has no room for must not keep E and P busy before.
        with self.limits.slot(Stage.DECODE, context.client.model) as slot:
            media = await self._load(context, slot)
            context.work = plan.prompt_work(context.client, media)
            slot.take()
            return await self._through_all(context, media)

    async def pass_on(self, context: RequestContext) -> web.StreamResponse:
        """Have one engine do all that the request asks for.

        Raises:
            ApiError: an item cannot be had, or the engine would not understand `*_save`.
            EngineError: the engines failed, or have too much to do.
        """
        client = context.client
        if client.save_params:
            name = next(iter(client.save_params))
            raise ApiError(400, f"`{name}` is not understood at this path.", param=name)
        with self.limits.slot(Stage.DECODE, client.model) as slot:
            media = await self._complete(context, await self._load(context, slot))
            # No engine has part of the answer in its caches.
            context.work = plan.prompt_work(client, media)._replace(key=b"")
            slot.take()
            return await self._decode.alone(context, plan.inline_request(client, media))

    async def _load(self, context: RequestContext, slot: Slot) -> list[Media]:
        """Return the request's media, without the bytes that it can do without. Nothing is fetched
        if `slot` cannot be taken now.
        """
        client = context.client
        if not client.items:
            return []
        slot.check()
        is_known = self._encode.known_items(client)
        return await self.media.load(client.items, context.blobs, context.reservation, is_known)

    async def _complete(self, context: RequestContext, media: list[Media]) -> list[Media]:
        """Return the request's media with all their bytes."""
        if all(held.url for held in media):
            return media
        items = context.client.items
        return await self.media.complete(items, media, context.blobs, context.reservation)

    async def _through_all(self, context: RequestContext, media: list[Media]) -> web.StreamResponse:
        """Return the answer of all stages, or of D alone if there are no others or one failed."""
        try:
            answer = await self._encode_first(context, media, may_repeat=True)
            if answer is not None:
                return answer
        except EngineError as failure:
            # D must not get the work of a stage that has too much to do as well, or the stage that
            # no request can do without fails next.
            to_refuse = failure.stage is Stage.DECODE or self._refuses_overload
            if failure.is_overload and to_refuse:
                raise
            logger.warning("request %s falls back to decode alone: %s", context.request_id, failure)
            self._counts["fallbacks"] += 1
            context.begin_again()
        media = await self._complete(context, media)
        if context.has_lost_media:
            media = [plan.renamed(held) for held in media]
        return await self._decode.alone(context, plan.inline_request(context.client, media))

    async def _encode_first(
        self, context: RequestContext, media: list[Media], *, may_repeat: bool
    ) -> web.StreamResponse | None:
        """Encode what E has not reported, then prefill and decode. None: neither E nor P is of use.

        If P or D fails without an item that E was not asked for this time, all items go to E, once.
        """
        client = context.client
        for_encode = self._encode.request_for(client) if client.items else None
        if for_encode is None:
            media = await self._complete(context, media)
            request = plan.inline_request(client, media)
            if self._prefill.serves(client):
                return await self._prefill.answer(context, request, media)
            return None
        encoded = await self._encode.run(context, for_encode, media, self._complete)
        try:
            if self._prefill.serves(client):
                return await self._prefill.answer(context, encoded.request, encoded.media)
            return await self._decode.after(context, encoded.request)
        except EngineError as failure:
            if failure.status not in LOST_STATUSES:
                raise
            context.has_lost_media = True
            if not (encoded.was_known and may_repeat):
                raise
            # Failures may go on, and must not multiply the load.
            if not self.retry_budget.after(failure.status).spend():
                raise
            logger.warning("request %s encodes its media again: %s", context.request_id, failure)
        self._counts["repeated"] += 1
        self._events.stage_retried(Stage.ENCODE)
        context.begin_again()
        # The embeddings may be gone, or P and D fail for another reason.
        with self._encode.index.doubted(encoded.keys):
            return await self._encode_first(context, media, may_repeat=False)
