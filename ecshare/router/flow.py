# SPDX-License-Identifier: Apache-2.0
"""The flow of one request through the stages.

E (encode) encodes each distinct item, P (prefill) prefills the conversation, D (decode) answers.
Where an engine fails, another one of its stage is asked; if E or P has none left, D gets the media
and does all three. D may get its request while P computes. It then loads what P has computed so far
while P computes the rest.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from aiohttp import web

from ecshare.router import plan
from ecshare.router.answers import Answers
from ecshare.router.call import Call
from ecshare.router.chat import CHAT
from ecshare.router.client_request import (
    EC_PARAMS,
    KV_PARAMS,
    ClientRequest,
    Media,
    Request,
)
from ecshare.router.client_view import PrefillUsage
from ecshare.router.config import RouterConfig
from ecshare.router.encoded import EncodedMedia
from ecshare.router.engines import Engine, EnginePool, Stage, Work
from ecshare.router.errors import ApiError, EngineError, RefusalError
from ecshare.router.limits import Place, StageLimits
from ecshare.router.metrics import RouterMetrics
from ecshare.router.middleware import RequestContext
from ecshare.router.prefilled import Known, PrefilledPrompts, turns_of, with_json_of
from ecshare.router.relay import Relay
from ecshare.router.retries import Attempt, Retries, RetryBudget
from ecshare.router.work import decode_work, item_work, prompt_work

logger = logging.getLogger(__name__)

_LOST_STATUSES = (500, 503)
"""What an engine answers to a request of which it has neither pixels nor embeddings, and to others
that fail."""


class _Encoded(NamedTuple):
    """A request whose media E has encoded, now or before."""

    request: Request
    media: list[Media]
    keys: tuple[bytes, ...]
    """Of the reports without which the request cannot be answered."""
    was_known: bool
    """Whether E was not asked for one of them."""


class Flow:
    """Takes requests through the stages. Belongs to the event loop's thread."""

    def __init__(
        self,
        config: RouterConfig,
        pools: Mapping[Stage, EnginePool],
        relay: Relay,
        metrics: RouterMetrics,
        clock_s: Callable[[], float],
    ) -> None:
        self._config = config
        self._pools = pools
        self._relay = relay
        self._metrics = metrics
        self._answers = Answers(config, relay)
        self._num_fallbacks = 0
        self._num_repeats = 0
        self.limits = StageLimits(
            pools,
            {
                Stage.ENCODE: config.max_encodes,
                Stage.PREFILL: config.max_prefills,
                Stage.DECODE: config.max_decodes,
            },
        )
        self.retry_budget = RetryBudget(config.retry_share, clock_s)
        self._retries = Retries(
            pools,
            self.retry_budget,
            metrics.count_retry,
            keeps_affinity=config.balance == "affinity",
        )
        self._prefilled = PrefilledPrompts(config.max_index_bytes, config.max_new_tokens, clock_s)
        self.encoded = EncodedMedia(config.max_index_bytes, config.stage_timeout_s)

    def counts(self) -> dict[str, Any]:
        """Return what was counted since the start. docs/metrics.md explains it."""
        return {
            "answered": dict(self._answers.paths),
            "fallbacks": self._num_fallbacks,
            "retries": self.retry_budget.status(),
            "encodes": self.encoded.status() | {"repeated": self._num_repeats},
            "prefills": self._prefilled.status(),
            "downloads": self._relay.media.status(),
        }

    async def answer(self, call: Call) -> web.StreamResponse:
        """Answer a request that has been read."""
        # Every request ends at D. One that D has no room for must not keep E and P busy before.
        with self.limits.place(Stage.DECODE, call.client.model) as place:
            media = await self._load(call, place)
            call.context.work = prompt_work(call.client, media)
            place.take()
            return await self._answer_from(call, media)

    async def pass_on(self, call: Call) -> web.StreamResponse:
        """Have one engine do all that the request asks for.

        Raises:
            ApiError: an item cannot be had, or the engine would not understand `*_save`.
        """
        if call.client.save_params:
            name = next(iter(call.client.save_params))
            raise ApiError(400, f"`{name}` is not understood at this path.", param=name)
        with self.limits.place(Stage.DECODE, call.client.model) as place:
            media = await self._complete(call, await self._load(call, place))
            # No engine has part of the answer in its caches.
            call.context.work = prompt_work(call.client, media)._replace(key=b"")
            place.take()
            return await self._decode_alone(call, plan.inline_request(call.client, media))

    async def _answer_from(self, call: Call, media: list[Media]) -> web.StreamResponse:
        context = call.context
        try:
            answer = await self._through_stages(call, media, may_repeat=True)
            if answer is not None:
                return answer
        except EngineError as failure:
            if self._is_refused(failure):
                raise
            logger.warning("request %s falls back to decode alone: %s", context.request_id, failure)
            self._num_fallbacks += 1
            context.path.clear()
            context.avoided.clear()
        plain = plan.inline_request(call.client, await self._complete(call, media))
        return await self._decode_alone(call, plain)

    def _is_refused(self, failure: EngineError) -> bool:
        """Tell whether a request ends because a stage has too much to do. D must not get its work
        as well, or the stage that no request can do without fails next.
        """
        to_refuse = failure.stage is Stage.DECODE or self._config.when_overloaded == "refuse"
        return failure.is_overload and to_refuse

    async def _load(self, call: Call, place: Place) -> list[Media]:
        """Return the request's media, without the bytes that it can do without.

        Raises:
            ApiError: an item cannot be had.
            EngineError: `place` cannot be taken now, and so nothing is fetched.
        """
        place.check()
        if not call.client.items:
            return []
        options = plan.encoding_options(self._for_encode(call.client) or call.client)

        def is_known(uuid: str) -> bool:
            key = plan.encoding_key(options, uuid)
            return call.client.endpoint.takes_metadata and self.encoded.knows(key)

        blobs = call.context.blobs
        return await self._relay.media.load(call.client.items, blobs, call.reservation, is_known)

    async def _complete(self, call: Call, media: list[Media]) -> list[Media]:
        """Return the request's media with all their bytes."""
        blobs = call.context.blobs
        return await self._relay.media.complete(call.client.items, media, blobs, call.reservation)

    async def _through_stages(
        self, call: Call, media: list[Media], *, may_repeat: bool
    ) -> web.StreamResponse | None:
        """Return the answer that E and P have worked for; None if there is neither.

        If P or D fails without an item that E was not asked for this time, all items go to E, once.

        Raises:
            ApiError: an item cannot be fetched that is needed after all.
            EngineError: a stage failed.
            RefusalError: a stage refused the request.
        """
        context, client = call.context, call.client
        for_encode = self._for_encode(client)
        if not client.items or for_encode is None:
            media = await self._complete(call, media)
            plain = plan.inline_request(client, media)
            return await self._from_prefill_on(call, plain, media, is_plain=True)
        encoded = await self._encode(call, for_encode, media)
        try:
            answer = await self._from_prefill_on(
                call, encoded.request, encoded.media, is_plain=False
            )
            _check_accepted(answer)
        except (EngineError, RefusalError) as failure:
            if not self._may_be_wrong(encoded, failure):
                raise
            if not (encoded.was_known and may_repeat and self._may_encode_again(failure)):
                raise
            logger.warning("request %s encodes its media again: %s", context.request_id, failure)
        else:
            self.encoded.confirm(encoded.keys)
            return answer
        self._num_repeats += 1
        self._metrics.count_retry(Stage.ENCODE)
        context.path.clear()
        context.avoided.clear()
        # The embeddings may be gone, or P and D fail for another reason.
        with self.encoded.doubted(encoded.keys):
            return await self._through_stages(call, media, may_repeat=False)

    def _may_encode_again(self, failure: EngineError | RefusalError) -> bool:
        # A report is refused once. Failures may go on, and must not multiply the load.
        return isinstance(failure, RefusalError) or self.retry_budget.after(failure.status).spend()

    def _for_encode(self, client: ClientRequest) -> ClientRequest | None:
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
        if model is None or self._config.adapter_encoders == "listed":
            return None
        base = self._pools[Stage.DECODE].base_of(model)
        return client.for_model(base) if base is not None and encoders.serving(base) else None

    def _may_be_wrong(self, encoded: _Encoded, failure: EngineError | RefusalError) -> bool:
        """Tell whether P or D may have failed because of what E is said to have reported."""
        if isinstance(failure, RefusalError):
            return self.encoded.is_hearsay(encoded.keys)
        return failure.status in _LOST_STATUSES

    async def _from_prefill_on(
        self, call: Call, request: Request, media: list[Media], *, is_plain: bool
    ) -> web.StreamResponse | None:
        """Return D's answer; None if D alone is to be asked and the request `is_plain`."""
        context, client = call.context, call.client
        prefillers = self._pools[Stage.PREFILL].serving(client.model)
        is_stored = client.allows(KV_PARAMS) and not plan.scores_prompt(client.endpoint, request)
        if not prefillers or not is_stored:
            return None if is_plain else await self._decode(call, request)
        if self._config.prefill == "needed":
            context.turns = turns_of(client, media)
            request = with_json_of(context.turns, client, request)
            known = self._prefilled.find(context.turns)
            if known is not None:
                return await self._decode_known(call, request, known)
        answer = await self._prefill(call, request)
        if not isinstance(answer, web.StreamResponse):
            answer = await self._decode(call, answer)
        if answer.status == 200:
            self._prefilled.note_answered(context.turns, context.passed_on.num_bytes)
        return answer

    async def _decode_known(self, call: Call, request: Request, known: Known) -> web.StreamResponse:
        """Return D's answer to a prompt that is stored, or nearly."""
        context = call.context
        context.avoided.append(Stage.PREFILL)
        try:
            answer = await self._decode(call, plan.decode_request(request, known.hand_over))
        except EngineError:
            self._prefilled.forget(context.turns)
            raise
        if answer.status == 200:
            self._prefilled.note_decoded(context.turns, known, context.passed_on.told())
            self._prefilled.note_answered(context.turns, context.passed_on.num_bytes)
        return answer

    async def _encode(self, call: Call, client: ClientRequest, media: list[Media]) -> _Encoded:
        """Return the request to P, with what E reports of the items or has reported before.

        `client` is the request that E gets them of.
        """
        context = call.context
        announced: Request = {}

        async def ask(request: Request, work: Work, place: Place) -> plan.Metadata | None:
            place.take()
            payload = context.payload(request, work)

            async def by(attempt: Attempt) -> Request:
                return await self._relay.ask(
                    attempt.engine, CHAT, payload, context.headers, call.reservation
                )

            answer = await self._retries.run(Stage.ENCODE, by, context, work)
            announced.update(plan.announced_media(answer))
            return plan.reported_metadata(answer)

        keys = _encoding_keys(client, media)
        known = self.encoded.known(keys)
        if len(known) == len(keys) and not plan.needs_bytes(client, media, known):
            context.avoided.append(Stage.ENCODE)
            reports = self.encoded.avoided(known)
        else:
            if not all(held.url for held in media):
                media = await self._complete(call, media)
                keys = _encoding_keys(client, media)
            requests = plan.encode_requests(client, media)
            limited = self.limits.place(Stage.ENCODE, client.model)
            with context.timed(Stage.ENCODE), limited as place:
                works = {
                    held.uuid: item_work(keys[held.uuid], item, client.model)
                    for item, held in zip(client.items, media, strict=True)
                }
                asks = {
                    uuid: partial(ask, each, works[uuid], place) for uuid, each in requests.items()
                }
                reports = await self.encoded.reports(keys, asks)
            if not reports.was_asked:
                context.path.remove(Stage.ENCODE)
                context.avoided.append(Stage.ENCODE)
        request = plan.encoded_request(call.client, media, reports.metadata, announced)
        needed = tuple(keys.values()) if client.endpoint.takes_metadata else ()
        return _Encoded(request, media, needed, was_known=bool(needed and reports.known))

    async def _prefill(self, call: Call, request: Request) -> web.StreamResponse | Request:
        """Have P prefill; return the request to D, or D's answer if D was asked meanwhile.

        D is asked meanwhile if P is known to store KV while it computes, and is idle. Behind other
        requests D would hold cache blocks for KV that P has not begun to compute.
        """
        is_streamed = self._config.hand_over == "streamed" and call.client.is_one_prompt

        async def by(attempt: Attempt) -> web.StreamResponse | Request:
            engine = attempt.engine
            if is_streamed and engine.streams and not engine.in_flight:
                return await self._prefill_and_decode(call, engine, request)
            return plan.decode_request(request, await self._hand_over_of(call, engine, request))

        return await self._retries.run(Stage.PREFILL, by, call.context, call.context.work)

    async def _hand_over_of(self, call: Call, engine: Engine, request: Request) -> Request | None:
        """Return what P hands over to D."""
        context, endpoint = call.context, call.client.endpoint
        limited = self.limits.place(Stage.PREFILL, call.client.model)
        with limited as place, context.timed(Stage.PREFILL):
            place.take()
            payload = context.payload(plan.prefill_request(endpoint, request), context.work)
            with _usage_of_prefill(context) as usage:
                answer = await self._relay.ask(
                    engine, endpoint.path, payload, context.headers, call.reservation
                )
                usage.told = plan.told_usage(answer)
        if context.turns:
            self._prefilled.note_prefilled(context.turns, answer)
        hand_over = plan.reported_hand_over(answer)
        self._pools[Stage.PREFILL].set_streams(engine, streams=plan.is_streamed(hand_over))
        # Of several prompts it describes the first alone.
        return hand_over if call.client.is_one_prompt else None

    async def _prefill_and_decode(
        self, call: Call, engine: Engine, request: Request
    ) -> web.StreamResponse | Request:
        """Return D's answer; D loads KV while P computes.

        D's request is cancelled if P ends before D has begun to answer, without having stored what
        D waits for. Then the request to send to D instead is returned.

        Raises:
            EngineError: P or D failed.
            RefusalError: P or D refused the request.
        """
        streamed = plan.decode_request(request, plan.STREAMED)
        prefilling = asyncio.create_task(self._hand_over_of(call, engine, request))
        answering = asyncio.create_task(self._decode(call, streamed, Stage.PREFILL))
        try:
            with self._pools[Stage.PREFILL].lease(engine):
                # Until the call holds its own lease: no other request may find the engine idle.
                await asyncio.sleep(0)
            await asyncio.wait((prefilling, answering), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and call.context.first_event_s is None:
                hand_over = prefilling.result()
                if not plan.is_streamed(hand_over):
                    return plan.decode_request(request, hand_over)
            answer = await answering
            if not prefilling.done() and answer.status == 200:
                told = call.context.passed_on.told()
                self._prefilled.note_done_first(call.context.turns, told)
            return answer
        finally:
            for task in (prefilling, answering):
                task.cancel()
            await asyncio.gather(prefilling, answering, return_exceptions=True)

    async def _decode_alone(self, call: Call, plain: Request) -> web.StreamResponse:
        """Ask D's in turn for all the work. The last one's answer counts, whatever it is."""

        async def by(attempt: Attempt) -> web.StreamResponse:
            return await self._answers.by(attempt, call, plain)

        work = decode_work(call.context.work, plain)
        return await self._retries.run(Stage.DECODE, by, call.context, work)

    async def _decode(
        self, call: Call, request: Request, concurrent_stage: Stage | None = None
    ) -> web.StreamResponse:
        """Pass on D's answer to a request that E and P have worked for.

        `concurrent_stage` is a stage that works for this answer at the same time.

        Raises:
            EngineError: D failed.
        """

        has_embeddings = bool(call.client.items)

        async def by(attempt: Attempt) -> web.StreamResponse:
            not_last = attempt._replace(is_last=_is_never_last)  # D alone is tried after it
            return await self._answers.by(not_last, call, request, concurrent_stage)

        def may_move(failure: EngineError) -> bool:
            # Else an embedding may be lost, for every D.
            return not has_embeddings or failure.status not in _LOST_STATUSES

        work = decode_work(call.context.work, request)
        return await self._retries.run(Stage.DECODE, by, call.context, work, may_move)


def _is_never_last(status: int | None = None) -> bool:
    return False


@contextmanager
def _usage_of_prefill(context: RequestContext) -> Iterator[PrefillUsage]:
    """Yield where P's usage belongs, while P is asked. A P that is not reached computes nothing."""
    usage = context.prefill_usage = PrefillUsage(was_asked=True)
    try:
        yield usage
    except EngineError as failure:
        usage.was_asked = failure.reached
        raise


def _check_accepted(answer: web.StreamResponse | None) -> None:
    """Check that D has not refused the request.

    Raises:
        RefusalError: it has.
    """
    if isinstance(answer, web.Response) and 400 <= answer.status < 500:
        assert isinstance(answer.body, bytes | bytearray)  # `verbatim` makes no other
        raise RefusalError(answer.status, bytes(answer.body), answer.content_type)


def _encoding_keys(client: ClientRequest, media: list[Media]) -> dict[str, bytes]:
    options = plan.encoding_options(client)
    return {held.uuid: plan.encoding_key(options, held.uuid) for held in media}
