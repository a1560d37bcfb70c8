# SPDX-License-Identifier: Apache-2.0
"""Calls of engines. Errors of the network end here: a call raises EngineError or RefusalError.

To leave a call closes its connection unless the whole answer was read, and so tells the engine that
nobody waits for the answer any more.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

import msgspec

from ecshare.router.api.client_request import Request
from ecshare.router.api.errors import GONE_STATUSES, OVERLOADED_STATUSES, EngineError, RefusalError
from ecshare.router.fleet.engines import Engine, EnginePool
from ecshare.router.fleet.exchange import BrokenError, ConnectError, Connections, Exchange
from ecshare.router.fleet.health import TimeLimits, Wait
from ecshare.router.fleet.watch import HealthWatch
from ecshare.router.http.bodies import Payload, Reservation
from ecshare.router.http.context import EngineCall, Events, RequestContext
from ecshare.router.options.config import RouterConfig
from ecshare.router.types import Stage, Work
from ecshare.store.integrity import TOKEN_HEADER

CONNECT_TIMEOUT_S = 5.0
MODELS = "/v1/models"
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
ANSWER_COST = 2
"""Bytes of memory for each byte of an answer: it is copied once more when it is sent."""
_RETURNED = ("Retry-After", "endpoint-load-metrics")
_WHOLE_SECONDS = re.compile(r"[0-9]{1,3}|[1-3][0-9]{3}")


@dataclass(eq=False, slots=True)
class Call:
    """One request to an engine, and its answer. `async with` sends it and waits for the head of the
    answer; the engine counts as busy until the block ends.

    Raises:
        EngineError: the engine fails, or a time limit ends, also inside the block.
    """

    _client: "EngineClient"
    engine: Engine
    _exchange: Exchange
    _limits: TimeLimits
    _context: RequestContext
    _record: EngineCall
    """What subscribers see of it."""
    _work: Work
    _wait: Wait | None = None
    _has_begun: bool = False
    status: int = 0
    failed: bool = False
    """Whether the status is 5xx, 408 or 429: another engine or another path may succeed."""
    content_type: str = ""
    is_stream: bool = False

    async def __aenter__(self) -> "Call":
        self._client.pools[self.engine.stage].begin(self.engine, self._work.tokens)
        health, limit_s = self.engine.health, self._limits.first_byte_s
        if limit_s is not None:
            clock_s, abort = asyncio.get_running_loop().time, self._exchange.abort
            self._wait = Wait(limit_s, clock_s, self._is_last_resort, abort)
            health.begin_wait(self._wait)
            if not health.is_watched:
                self._client.watch.start(self.engine)
        try:
            await self._exchange.begin()
        except OSError as exc:  # with time-outs
            raise self._ended_by(exc) from exc  # no variable: it and its traceback form a cycle
        except BaseException as exc:
            self._end(exc)
            raise
        self._read_head()
        return self

    async def __aexit__(
        self, kind: object, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(exc)

    def _is_last_resort(self) -> bool:
        pool = self._client.pools[self.engine.stage]
        # Decode can do the work of the other stages, so only a decode engine can be the last.
        if self.engine.stage is Stage.DECODE and not pool.choose([self.engine], self._work):
            return True
        return self._limits.is_last_resort()

    def _ended_by(self, exc: OSError) -> EngineError:
        """End a call without an answer, and return its error. The engine is down unless it may just
        be slow: the watch finds engines that hang.
        """
        if not isinstance(exc, TimeoutError):
            self.engine.health.note_lost_connection()
        failure = _unanswered(self.engine, exc)
        failure.__cause__ = exc  # `_end` looks at it
        self._end(failure)
        return failure

    def _read_head(self) -> None:
        status = self.status = self._record.status = self._exchange.status
        self.failed = _is_failure(status)
        self.content_type = _content_type(self._exchange)
        self.is_stream = status == 200 and self.content_type.startswith("text/event-stream")
        if status in GONE_STATUSES:
            self._record.first_byte_s = time.monotonic()
            self.engine.health.note_lost_connection()
        elif self.is_stream:
            # Its head arrives before any token is computed, and so may comments in it.
            self.engine.health.note_reached()
        else:
            self.begin(is_error=self.failed)

    def begin(self, *, is_error: bool) -> None:
        """Note that an answer has begun: with an error, or with a part of what was asked for."""
        self._has_begun = True
        if self._record.first_byte_s is None:
            self._record.first_byte_s = time.monotonic()
        health, wait, self._wait = self.engine.health, self._wait, None
        health.note_reached()
        health.note_begin(wait, serves=not is_error)

    def _end(self, failure: BaseException | None) -> None:
        self._exchange.close()
        wait, self._wait = self._wait, None
        if wait is not None:
            # One that breaks the connection is down, and may be back soon.
            is_silent = failure is not None and _is_silence(failure)
            health = self.engine.health
            (health.note_silence if is_silent else health.end_wait)(wait)
        if isinstance(failure, EngineError):
            self.engine.health.note_failure()
        EnginePool.end(self.engine, self._work.tokens)
        self._client.events.call_ended(self._context, self._record, failure)

    def returned(self) -> dict[str, str]:
        """Return the headers of the engine that the client gets."""
        given = self._exchange.headers
        more = {name: given[low] for name in _RETURNED if (low := name.lower()) in given}
        return {**more, "Content-Type": self.content_type}

    def failure(self) -> EngineError:
        """Return the error of an answer that `failed`."""
        reason = f"HTTP {self.status}"
        error = EngineError(self.engine.stage, reason, reached=True, status=self.status)
        error.retry_after_s = _seconds(self._exchange.headers.get("retry-after"))
        return error

    async def chunk(self) -> bytes:
        """Return what has arrived of the body, unchanged; empty: it has ended.

        Raises:
            EngineError: it breaks off.
        """
        try:
            chunk = await self._exchange.chunk()
        except OSError as exc:
            self._record.is_broken = True  # the reader may handle the error within the call
            reason = f"the answer broke off: {exc or type(exc).__name__}"
            raise EngineError(self.engine.stage, reason, reached=True) from exc
        # A comment in a stream is no sign of life: vLLM's server sends them while its engine hangs.
        if chunk and self._has_begun and not (self.is_stream and chunk.startswith(b":")):
            self.engine.health.note_sign_of_life()
        return chunk

    async def read(self, reservation: Reservation) -> bytearray:
        """Return the whole body. The memory for it is taken from `reservation`.

        Raises:
            ApiError: there is no memory for it.
            EngineError: it breaks off or is far too large.
        """
        body = bytearray()
        while not self._exchange.is_over:
            chunk = await self.chunk()
            reservation.take(len(chunk) * ANSWER_COST)
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES:
                raise EngineError(self.engine.stage, "the answer is too large", reached=True)
        return body


class EngineClient:
    """Calls engines, over connections that are kept. Create and close it inside the event loop."""

    def __init__(
        self,
        config: RouterConfig,
        pools: Mapping[Stage, EnginePool],
        events: Events,
        clock_s: Callable[[], float],
    ) -> None:
        """`events` hear of the calls that are made for a request of a client."""
        self._stage_limits = TimeLimits(config.stage_timeout_s, config.stage_timeout_s)
        self.pools = pools
        self.events = events
        self._own_headers = {"Content-Type": "application/json"}
        if config.router_token:
            self._own_headers[TOKEN_HEADER] = config.router_token
        self._connections = Connections(config.max_connections, connect_timeout_s=CONNECT_TIMEOUT_S)
        shortest_limit_s = min(config.first_byte_timeout_s, config.stage_timeout_s)
        self.watch = HealthWatch(pools, self.is_healthy, shortest_limit_s, clock_s)

    async def close(self) -> None:
        """Close every connection."""
        await self.watch.close()
        await self._connections.close()

    def call(
        self,
        context: RequestContext,
        engine: Engine,
        payload: Payload,
        limits: TimeLimits,
        path: str | None = None,
    ) -> Call:
        """Return the call of an engine for a client's request; `path`: the client's own."""
        record = EngineCall(engine.stage, engine.name)
        self.events.call_began(context, record)
        headers = {**context.headers, **self._own_headers, **record.headers}
        url = engine.url + (path or context.client.endpoint.path)
        exchange = self._connections.exchange("POST", url, headers, payload, limits.total_s)
        return Call(self, engine, exchange, limits, context, record, payload.work)

    async def ask(
        self,
        context: RequestContext,
        engine: Engine,
        payload: Payload,
        path: str | None = None,
    ) -> Request:
        """Return the JSON object of an encode or prefill engine, within the stage's time limit.

        Raises:
            ApiError: there is no memory for the answer.
            RefusalError: the engine answered 4xx.
            EngineError: there was no usable answer.
        """
        try:
            async with self.call(context, engine, payload, self._stage_limits, path) as call:
                body = await call.read(context.reservation)
                if call.failed or (call.status == 404 and lacks_model(body)):
                    raise call.failure()
                if call.status >= 400:
                    raise RefusalError(call.status, bytes(body), call.content_type)
                try:
                    return msgspec.json.decode(body, type=Request)
                except (ValueError, RecursionError) as exc:  # also where it is no UTF-8
                    reason = f"unreadable answer: {exc}"
                    raise EngineError(engine.stage, reason, reached=True) from exc
        except EngineError as failure:
            if failure.reached and _is_silence(failure) and not engine.health.is_hung:
                failure.note_overload()
            raise

    async def models(
        self, engine: Engine, headers: Mapping[str, str], limit_s: float
    ) -> bytearray | None:
        """Return an engine's list of models as it tells a client with these headers, None if it
        gives none. That is no work: it says nothing of the engine's health.

        Raises:
            RefusalError: the engine does not serve the client.
            EngineError: it did not answer.
        """
        headers = {**headers, **self._own_headers}
        exchange = self._connections.exchange("GET", engine.url + MODELS, headers, None, limit_s)
        body = bytearray()
        try:
            await exchange.begin()
            while chunk := await exchange.chunk():
                body += chunk
                if len(body) > _MAX_ANSWER_BYTES:
                    raise BrokenError("the answer is too large")
        except OSError as exc:
            raise _unanswered(engine, exc) from exc
        finally:
            exchange.close()
        if exchange.status in (401, 403):
            raise RefusalError(exchange.status, bytes(body), _content_type(exchange))
        if _is_failure(exchange.status):
            raise EngineError(engine.stage, f"HTTP {exchange.status}", reached=True)
        return body if exchange.status == 200 else None

    async def is_healthy(self, engine: Engine, limit_s: float) -> bool:
        """Ask one engine whether it is healthy."""
        exchange = self._connections.exchange("GET", f"{engine.url}/health", {}, None, limit_s)
        try:
            await exchange.begin()
        except OSError:
            return False
        finally:
            exchange.close()
        return exchange.status == 200


def _unanswered(engine: Engine, exc: OSError) -> EngineError:
    reason = f"{engine.url}: {exc or type(exc).__name__}"
    return EngineError(engine.stage, reason, reached=not isinstance(exc, ConnectError))


def _is_failure(status: int) -> bool:
    return status >= 500 or status in OVERLOADED_STATUSES


def _is_silence(failure: BaseException) -> bool:
    """Tell whether a call has ended because the engine took too long for us or for the client."""
    return not isinstance(failure, Exception) or isinstance(failure.__cause__, TimeoutError)


def _content_type(exchange: Exchange) -> str:
    return exchange.headers.get("content-type", "application/json")


def lacks_model(body: bytes | bytearray) -> bool:
    """Tell whether an engine says, with a 404, that it does not serve the model of a request.

    It may have unloaded it a moment ago, or not list its models. It has no error to tell of a path
    that it does not serve.
    """
    try:
        return "error" in msgspec.json.decode(body, type=Request)
    except (ValueError, RecursionError):
        return False


def _seconds(retry_after: str | None) -> float | None:
    """Return what a Retry-After header says, None if it is no number of seconds up to an hour."""
    is_number = retry_after is not None and _WHOLE_SECONDS.fullmatch(retry_after)
    return float(retry_after) if is_number and retry_after else None
