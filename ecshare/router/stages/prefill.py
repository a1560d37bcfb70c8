# SPDX-License-Identifier: Apache-2.0
"""Prefill: P prefills a prompt, unless it has stored it. D may load while P computes.

A prompt is known by the digests of its messages (`turns_of`). A wrong guess costs time only: D
looks KV up by its own tokens.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aiohttp import web
from msgspec import Struct

from ecshare.router.api.answer import PrefillUsage
from ecshare.router.api.client_request import (
    KV_PARAMS,
    ClientRequest,
    Media,
    Request,
    Turn,
    turns_of,
    with_json_of,
)
from ecshare.router.api.errors import EngineError
from ecshare.router.fleet.client import EngineClient
from ecshare.router.fleet.engines import Engine
from ecshare.router.fleet.retries import Attempt, Retries
from ecshare.router.http.bodies import Payload
from ecshare.router.http.context import RequestContext
from ecshare.router.options.config import RouterConfig
from ecshare.router.reuse import KEPT_S, ON_ITS_WAY_S, ReportIndex
from ecshare.router.siblings import Siblings
from ecshare.router.stages import plan
from ecshare.router.stages.decode import Decode
from ecshare.router.stages.limits import StageLimits
from ecshare.router.types import Stage
from ecshare.store.threads import end_all

logger = logging.getLogger(__name__)

_ENTRY_BYTES = 500
_CHARS_A_TOKEN = 4
_MUCH = 0.5
"""D was not served by the store if it has computed more than this share of a known prompt."""


class Known(NamedTuple):
    """A prompt that D can compute the rest of."""

    missing_chars: int
    """How much text D computes, about."""
    hand_over: Request | None
    """What P announced, if it may still be on its way."""


class _Stored(Struct):
    missing_chars: int
    hand_over: Request
    stored_s: float
    answer_bytes: int = 0
    """The size of D's answer to it, as D has sent it."""


class PrefilledPrompts:
    """A bounded index of what is stored, for all requests. Belongs to the event loop's thread."""

    def __init__(
        self,
        max_bytes: int,
        max_new_tokens: int,
        clock_s: Callable[[], float],
        siblings: Siblings,
    ) -> None:
        """`max_new_tokens`: how much text D may compute itself, estimated."""
        self._index = ReportIndex("prefilled", _Stored, lambda _: _ENTRY_BYTES, max_bytes, siblings)
        self._max_new_chars = _CHARS_A_TOKEN * max_new_tokens
        self._clock_s = clock_s
        self._num_asked = 0
        self._num_avoided = 0
        self._num_lost = 0

    def find(self, turns: list[Turn]) -> Known | None:
        """Return what is known of a prompt; None: P is to be asked.

        D's own answer to a known prompt is not new: D has it or has stored it, and to compute it
        once more takes a small part of the time that the answer took.
        """
        new_chars = answer_chars = 0
        for turn in reversed(turns):
            stored = self._index.get(turn.digest)
            if stored is not None:
                return self._known(stored, new_chars - min(answer_chars, stored.answer_bytes))
            new_chars += turn.num_chars
            answer_chars = turn.num_chars if turn.is_answer else 0
            if turn.has_media or new_chars - answer_chars > self._max_new_chars:
                break
        return None

    def _known(self, stored: _Stored, new_chars: int) -> Known | None:
        age_s = self._clock_s() - stored.stored_s
        missing_chars = stored.missing_chars + new_chars
        if age_s >= KEPT_S or missing_chars > self._max_new_chars:
            return None
        is_on_its_way = age_s < ON_ITS_WAY_S and not new_chars and stored.hand_over
        return Known(missing_chars, stored.hand_over if is_on_its_way else None)

    def note_prefilled(self, turns: list[Turn], answer: Request) -> None:
        """Note what P's `answer` says that it has stored."""
        self._num_asked += 1
        hand_over = plan.reported_hand_over(answer)
        num_missing = plan.num_missing_tokens(answer)
        if num_missing is None or hand_over is None:
            self.forget(turns)
        else:
            # The rest, if any, has served once.
            stored = {"kvshare": hand_over["kvshare"]}
            self._note(turns, _CHARS_A_TOKEN * num_missing, stored)

    def note_decoded(self, turns: list[Turn], known: Known, answer: Request) -> None:
        """Note D's `answer` to a known prompt. D has stored what was new of it, if it does.

        If D has computed far more than that, the prompt is forgotten: the store has lost it, or is
        too slow for D to load from.
        """
        self._num_avoided += 1
        tokens = plan.prompt_tokens(answer)
        if tokens is not None and self._has_computed_much(tokens):
            self._num_lost += 1
            self.forget(turns)
        elif self._index.get(turns[-1].digest) is None:
            self._note(turns, known.missing_chars, {})

    def _has_computed_much(self, tokens: plan.PromptTokens) -> bool:
        computed = tokens.total - tokens.cached
        is_more_than_new = computed * _CHARS_A_TOKEN > self._max_new_chars
        return is_more_than_new and computed > _MUCH * tokens.total

    def note_done_first(self, turns: list[Turn], answer: Request) -> None:
        """Note that D has answered before P, if its `answer` tells that it has stored the prompt or
        had it.
        """
        tokens = plan.prompt_tokens(answer)
        num_missing = plan.num_missing_tokens(answer)
        if num_missing is None and tokens is not None and not self._has_computed_much(tokens):
            num_missing = max(0, tokens.total - 1 - tokens.cached)
        if turns and num_missing is not None:
            self._note(turns, _CHARS_A_TOKEN * num_missing, {})

    def note_answered(self, turns: list[Turn], num_bytes: int) -> None:
        """Note the size of D's answer, as it was sent, to a prompt that may be known now."""
        stored = self._index.get(turns[-1].digest) if turns else None
        if stored is not None and stored.answer_bytes != num_bytes:
            stored.answer_bytes = num_bytes
            self._index.announce(turns[-1].digest, stored)

    def forget(self, turns: list[Turn]) -> None:
        """Have P asked for this prompt again."""
        for turn in turns:
            self._index.forget(turn.digest)

    def status(self) -> dict[str, int]:
        """Return counts for the status page."""
        return {
            "asked": self._num_asked,
            "avoided": self._num_avoided,
            "lost": self._num_lost,
            **self._index.status(),
        }

    def _note(self, turns: list[Turn], missing_chars: int, hand_over: Request) -> None:
        self._index.remember(turns[-1].digest, _Stored(missing_chars, hand_over, self._clock_s()))


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

    def serves(self, client: ClientRequest) -> bool:
        """Tell whether P is of use: one serves the model, and D can have what it computes."""
        return (
            bool(self._pool.serving(client.model))
            and (client.allows(KV_PARAMS) or self._is_direct(client))
            and not client.scores_prompt()
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

        D is asked meanwhile if the prompt is long, and P is known to store KV while it computes,
        and is idle. A short prompt is computed in one step, and D would only wait. Behind other
        requests it would hold cache blocks for KV that P has not begun to compute.
        """
        is_early = self._hands_over_early and context.client.is_one_prompt
        is_early = is_early and context.work.tokens >= plan.STREAMED_TOKENS

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
        params = plan.DIRECT if self._is_direct(client) else plan.FOR_DECODE
        with self._limits.slot(Stage.PREFILL, client.model) as slot:
            slot.take()
            with context.timed(Stage.PREFILL):
                for_prefill = plan.prefill_request(
                    client.endpoint, request, params, context.new_media
                )
                payload = Payload(context.blobs, for_prefill, context.work)
                usage = context.prefill_usage = PrefillUsage(was_asked=True)
                try:
                    answer = await self._client.ask(context, engine, payload)
                except EngineError as failure:
                    usage.was_asked = failure.reached  # a P that is not reached computes nothing
                    raise
        told = answer.get("usage")
        usage.told = told if isinstance(told, dict) else None
        hand_over = plan.reported_hand_over(answer)
        engine.streams = plan.is_streamed(hand_over)
        if context.turns:
            self.index.note_prefilled(context.turns, answer)
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
            if left := [task for task in (prefilling, answering) if not task.done()]:
                await end_all(left)
            for task in (prefilling, answering):
                if not task.cancelled():
                    task.exception()  # it counts as seen
            # Their errors refer to this frame: that cycle would keep the request.
            del left, task, prefilling, answering
