# SPDX-License-Identifier: Apache-2.0
"""Prefill: P prefills a prompt, unless it has stored it. D may load while P computes."""

import asyncio
import logging
from collections.abc import Sequence

from aiohttp import web

from ecshare.router.api.answer import PrefillUsage
from ecshare.router.api.client_request import (
    KV_PARAMS,
    ClientRequest,
    Media,
    Request,
    turns_of,
    with_json_of,
)
from ecshare.router.api.errors import EngineError
from ecshare.router.fleet.client import EngineClient
from ecshare.router.fleet.engines import Engine
from ecshare.router.fleet.retries import Attempt, Retries
from ecshare.router.http.context import RequestContext
from ecshare.router.options.config import RouterConfig
from ecshare.router.stages import plan
from ecshare.router.stages.decode import Decode
from ecshare.router.stages.limits import StageLimits
from ecshare.router.stages.prefilled import Known, PrefilledPrompts
from ecshare.router.types import Stage

logger = logging.getLogger(__name__)


class Prefill:
    """Asks prefill engines, and then decode. Belongs to the event loop's thread."""

    def __init__(  # noqa: PLR0913 — the parts that all stages share
        self,
        config: RouterConfig,
        client: EngineClient,
        retries: Retries,
        limits: StageLimits,
        decode: Decode,
        index: PrefilledPrompts,
    ) -> None:
        self._pool = client.pools[Stage.PREFILL]
        self._client = client
        self._retries = retries
        self._limits = limits
        self._decode = decode
        self._asks_only_if_needed = config.prefill == "needed"
        self._hands_over_early = config.hand_over == "streamed"
        self._hands_over_directly = config.hand_over == "direct"
        self._indirect: set[str] = set()
        """The P that were found to hand over nothing directly."""
        self.index = index

    def serves(self, context: RequestContext, request: Request) -> bool:
        """Tell whether P is of use: one serves the model, and D can have what it computes."""
        client = context.client
        return (
            bool(self._pool.serving(client.model))
            and (client.allows(KV_PARAMS) or self._is_direct(client))
            and not plan.scores_prompt(client.endpoint, request)
        )

    def _is_direct(self, client: ClientRequest) -> bool:
        """Tell whether D fetches what P computes by a connector beside ours."""
        return self._hands_over_directly and plan.is_fetched_once(client)

    async def answer(
        self, context: RequestContext, request: Request, media: Sequence[Media]
    ) -> web.StreamResponse:
        """Return D's answer to a prompt that P has stored, now or before.

        Raises:
            EngineError: P or D failed.
            RefusalError: P or D refused the request.
        """
        if self._asks_only_if_needed:
            client = context.client
            context.turns = turns_of(client, media)
            request = with_json_of(context.turns, client, request)
            known = self.index.find(context.turns)
            if known is not None:
                return await self._answer_known(context, request, known)
        answer = await self._prefill(context, request)
        if not isinstance(answer, web.StreamResponse):
            answer = await self._decode.after(context, answer)
        if answer.status == 200:
            self.index.note_answered(context.turns, context.tail.num_bytes)
        return answer

    async def _answer_known(
        self, context: RequestContext, request: Request, known: Known
    ) -> web.StreamResponse:
        """Return D's answer to a prompt that is stored, or nearly."""
        context.avoided.append(Stage.PREFILL)
        for_decode = plan.decode_request(request, known.hand_over)
        try:
            answer = await self._decode.after(context, for_decode)
        except EngineError:
            self.index.forget(context.turns)
            raise
        if answer.status == 200:
            self.index.note_decoded(context.turns, known, context.tail.usage())
            self.index.note_answered(context.turns, context.tail.num_bytes)
        return answer

    async def _prefill(
        self, context: RequestContext, request: Request
    ) -> web.StreamResponse | Request:
        """Have P prefill; return the request to D, or D's answer if D was asked meanwhile.

        D is asked meanwhile if P is known to store KV while it computes, and is idle. Behind other
        requests D would hold cache blocks for KV that P has not begun to compute.
        """
        is_early = self._hands_over_early and context.client.is_one_prompt

        async def ask(attempt: Attempt) -> web.StreamResponse | Request:
            engine = attempt.engine
            if is_early and engine.streams and not engine.in_flight:
                return await self._prefill_and_decode(context, engine, request)
            return plan.decode_request(request, await self._hand_over(context, engine, request))

        return await self._retries.run(Stage.PREFILL, ask, context, context.work)

    async def _hand_over(
        self, context: RequestContext, engine: Engine, request: Request
    ) -> Request | None:
        """Return what P hands over to D."""
        client = context.client
        with self._limits.slot(Stage.PREFILL, client.model) as slot, context.timed(Stage.PREFILL):
            slot.take()
            params = plan.DIRECT if self._is_direct(client) else plan.FOR_DECODE
            for_prefill = plan.prefill_request(client.endpoint, request, params)
            payload = context.payload(for_prefill, context.work)
            usage = context.prefill_usage = PrefillUsage(was_asked=True)
            try:
                answer = await self._client.ask(context, engine, payload)
            except EngineError as failure:
                usage.was_asked = failure.reached  # a P that is not reached computes nothing
                raise
        usage.told = plan.told_usage(answer)
        if context.turns:
            self.index.note_prefilled(context.turns, answer)
        hand_over = plan.reported_hand_over(answer)
        engine.streams = plan.is_streamed(hand_over)
        if params is plan.DIRECT and not plan.serves_once(hand_over):
            self._warn_of_indirect(engine)
        # Of several prompts it describes the first alone.
        return hand_over if client.is_one_prompt else None

    def _warn_of_indirect(self, engine: Engine) -> None:
        if engine.url not in self._indirect:
            self._indirect.add(engine.url)
            logger.warning(
                "--hand-over direct: %s hands nothing over but by way of the store, if at all: its "
                "--kv-transfer-config needs a connector such as NIXL's beside ours",
                engine.url,
            )

    async def _prefill_and_decode(
        self, context: RequestContext, engine: Engine, request: Request
    ) -> web.StreamResponse | Request:
        """Return D's answer; D loads KV while P computes.

        D's request is cancelled if P ends before D has begun to answer, without having stored what
        D waits for. Then the request to send to D instead is returned.

        Raises:
            EngineError: P or D failed.
            RefusalError: P or D refused the request.
        """
        streamed = plan.decode_request(request, plan.STREAMED)
        prefilling = asyncio.create_task(self._hand_over(context, engine, request))
        answering = asyncio.create_task(self._decode.after(context, streamed, Stage.PREFILL))
        try:
            self._pool.begin(engine, 0)
            try:
                # Until the call counts by itself: no other request may find the engine idle.
                await asyncio.sleep(0)
            finally:
                self._pool.end(engine, 0)
            await asyncio.wait((prefilling, answering), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and context.first_event_s is None:
                hand_over = prefilling.result()
                if not plan.is_streamed(hand_over):
                    return plan.decode_request(request, hand_over)
            answer = await answering
            if not prefilling.done() and answer.status == 200:
                self.index.note_done_first(context.turns, context.tail.usage())
            return answer
        finally:
            for task in (prefilling, answering):
                task.cancel()
            await asyncio.gather(prefilling, answering, return_exceptions=True)
            # Their errors refer to this frame: that cycle would keep the request.
            del task, prefilling, answering
