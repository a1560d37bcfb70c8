# SPDX-License-Identifier: Apache-2.0
"""Sends a corpus within limits, and counts the outcomes."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pybase64
from msgspec import Struct

from ecshare.router.api.chat import CHAT_ENDPOINT, read_chat
from ecshare.router.api.client_request import MODALITIES, ClientRequest, Media, MediaItem
from ecshare.router.api.endpoints import read_completion
from ecshare.router.api.errors import ApiError
from ecshare.router.http.bodies import Blobs, MemoryBudget, Reservation
from ecshare.router.media.identity import inline_url
from ecshare.router.media.loader import MediaLoader
from ecshare.router.options.config import RouterConfig
from ecshare.upkeep.calls import InFlight
from ecshare.warm.client import Client
from ecshare.warm.corpus import Line, Medium, Other, Sample, Unusable, Url, WarmError
from ecshare.warm.server_kinds import Outcome, ServerKind, ServerRequest
from ecshare.warm.stored import StoredMedia

_MOST_SEEN = 1_000_000  # media that a run remembers, to send none of them twice
# Copies of a medium in memory: its bytes, base64, the request, and the part that is being sent.
_COPIES = 4
_MOST_ITEMS = 256


class Limits(Struct, frozen=True, kw_only=True):
    """The limits of a run."""

    concurrency: int
    memory_bytes: int
    max_bytes: int
    """The largest medium."""
    max_failures: int
    most: int | None
    """How many new requests to send; None: all."""
    num_shown: int = 20


class Report(Struct):
    """The outcomes of the samples so far."""

    counts: dict[Outcome, int] = msgspec.field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    num_bytes: dict[Outcome, int] = msgspec.field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    """The bytes of media that were read on this host or downloaded."""
    failures: list[tuple[str, str]] = []
    """The sample and the reason of the first failures."""
    seconds: float = 0.0
    stopped: str = ""
    """Why the run ended before the corpus did."""

    def add(self, outcome: Outcome, num_bytes: int = 0) -> None:
        """Count one sample."""
        self.counts[outcome] += 1
        self.num_bytes[outcome] += num_bytes


class Run:
    """One run over a corpus. Belongs to the event loop's thread."""

    def __init__(
        self,
        kind: ServerKind,
        client: Client | None,
        model: str,
        limits: Limits,
        config: RouterConfig,
    ) -> None:
        """`client`: None for an estimate, which sends nothing."""
        self.report = Report()
        self.stored: StoredMedia | None = None
        """The media that are not sent, because the store has them; None: unknown."""
        self._kind, self._client, self._model, self._limits = kind, client, model, limits
        self._in_flight = InFlight(limits.memory_bytes)
        self._config = config
        self._loader: MediaLoader
        self._seen: set[bytes] = set()
        self._num_begun = 0
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="ecshare-warm")

    async def send_all(self, samples: Iterator[Sample], on_done: Callable[[], None]) -> None:
        """Send all samples, and count in `report`. `on_done` is called after each sample."""
        began_s = time.monotonic()
        self._loader = MediaLoader(self._config)
        reading = ThreadPoolExecutor(1, thread_name_prefix="ecshare-corpus")
        loop, lock = asyncio.get_running_loop(), asyncio.Lock()

        async def worker() -> None:
            while True:
                async with lock:
                    if self.report.stopped:
                        return
                    sample = await loop.run_in_executor(reading, next, samples, None)
                if sample is None:
                    return
                await self._process(sample)
                on_done()
                self.report.seconds = time.monotonic() - began_s

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._limits.concurrency):
                    group.create_task(worker())
        finally:
            self.report.seconds = time.monotonic() - began_s
            reading.shutdown(wait=False, cancel_futures=True)
            self._threads.shutdown(wait=False, cancel_futures=True)
            await self._loader.close()

    async def _process(self, sample: Sample) -> None:
        if isinstance(sample, Other):
            self.report.add(Outcome.OTHER)
        elif isinstance(sample, Unusable):
            self._fail(sample.where, sample.reason)
        else:
            num_bytes = _COPIES * self._size(sample)
            await self._in_flight.enter(num_bytes)
            try:
                await self._send(sample)
            except ApiError as exc:
                at = f"`{exc.param}`: " if exc.param else ""
                self._fail(sample.where, exc.reason or at + exc.message)
            except (WarmError, OSError, ValueError, RecursionError) as exc:
                self._fail(sample.where, str(exc))
            finally:
                await self._in_flight.leave(num_bytes)

    def _size(self, sample: Medium | Url | Line) -> int:
        if isinstance(sample, Medium):
            return sample.num_bytes
        if isinstance(sample, Url):
            return self._limits.max_bytes if self._kind.loads_media and self._client else 0
        may_download = self._kind.loads_media and b"http" in sample.json
        return len(sample.json) + (self._limits.max_bytes if may_download else 0)

    def _fail(self, where: str, reason: str) -> None:
        report = self.report
        report.add(Outcome.FAILED)
        if len(report.failures) < self._limits.num_shown:
            report.failures.append((where, reason))
        if report.counts[Outcome.FAILED] >= self._limits.max_failures:
            report.stopped = "as many have failed as may (--max-failures)"

    async def _send(self, sample: Medium | Url | Line) -> None:
        """Send the requests of a sample, and count the outcome of each.

        Raises:
            ApiError, WarmError, OSError: the sample cannot be sent.
        """
        loop = asyncio.get_running_loop()
        client = await loop.run_in_executor(self._threads, _request_of, sample, self._model)
        if self._kind.needs_media and not client.items:
            self.report.add(Outcome.OTHER)
            return
        if isinstance(sample, Url) and self._client is None:
            self.report.add(Outcome.NEW)  # an estimate downloads nothing
            return
        blobs, media = Blobs(), list[Media]()
        try:
            if self._kind.loads_media:
                budget = MemoryBudget(_MOST_ITEMS * self._limits.max_bytes)
                media = await self._loader.load(client.items, blobs, Reservation(budget))
            for request in self._kind.requests(client, media):
                await self._post(sample, request, blobs)
        finally:
            blobs.clear()

    async def _post(
        self, sample: Medium | Url | Line, request: ServerRequest, blobs: Blobs
    ) -> None:
        """Send one request, unless its medium was sent before, or is known to be stored."""
        size = sample.num_bytes if isinstance(sample, Medium) else 0
        if request.uuid:
            if self._is_seen(request.uuid):
                self.report.add(Outcome.REPEATED, size)
                return
            if self.stored is not None and self.stored.has(request.uuid):
                self.report.add(Outcome.THERE, size)
                return
        if self._num_begun == self._limits.most:
            self.report.stopped = "as many were sent as were to be (--most)"
            return
        self._num_begun += 1
        if self._client is None:
            self.report.add(Outcome.NEW, size)
            return
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(self._threads, _body, request, blobs)
        try:
            answer, headers = await self._client.post(request.path, body)
            self.report.add(self._kind.outcome(answer, headers), size or len(body) * 3 // 4)
        except WarmError as exc:
            self._fail(sample.where, str(exc))

    def _is_seen(self, uuid: str) -> bool:
        name = bytes.fromhex(uuid)[:16]
        if name in self._seen:
            return True
        if len(self._seen) < _MOST_SEEN:
            self._seen.add(name)
        return False


def _request_of(sample: Medium | Url | Line, model: str) -> ClientRequest:
    """Return a sample as the request of a client. Any thread.

    Raises:
        ApiError: the line is not a request; names the field at fault.
        WarmError, OSError: the medium cannot be read.
    """
    if isinstance(sample, Line):
        # Texts contain no bare quotes, so this is the name of a field.
        read = read_chat if b'"messages"' in sample.json else read_completion
        client = read(sample.json.strip(), _MOST_ITEMS)
        if client.endpoint.prompt not in client.request:
            raise ApiError(400, "there is neither `messages` nor `prompt`")
        return client if client.model else client.for_model(model)
    if isinstance(sample, Url):
        url = sample.url
    else:
        url = inline_url(pybase64.b64encode(sample.read()).decode())
    part = {"type": sample.kind, sample.kind: {"url": url}}
    request = {"model": model, "messages": [{"role": "user", "content": [part]}]}
    item = MediaItem(("messages", 0, "content", 0), sample.kind, url, MODALITIES[sample.kind])
    return ClientRequest(request, (item,), CHAT_ENDPOINT, model)


def _body(request: ServerRequest, blobs: Blobs) -> bytes:
    return b"".join(blobs.pieces(msgspec.json.encode(request.body)))
