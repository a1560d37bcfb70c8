# SPDX-License-Identifier: Apache-2.0
"""Follows the epoch of an engine's model, and decides when the engine may share in it.

An operator who updates weights in place runs `ecshare epoch next` first. Engines read the new epoch
within seconds, and then share nothing: their weights may be old or new. vLLM's reset of its cache,
which has to follow an update, is the boundary: nothing in the cache is older. From the first read
after it the engine shares in the namespace of the epoch that was read. Until its first reset an
engine has the weights of its files: whatever the epoch is then, it shares in that of epoch 0.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable

from ecshare.store.epochs import READ_EVERY_S, read_epoch, write_epoch
from ecshare.store.errors import StoreDenied, StoreError
from ecshare.store.integrity import Integrity
from ecshare.store.objects import ObjectStore
from ecshare.transfer.upkeep.renewal import RENEWAL_S, Record

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_WARN_AFTER_S = 60.0


class EpochReader:
    """Reads the epoch every few seconds.

    Ownership: the I/O thread, that of `loop`. Any thread may call `ask` and `has_answered`, and
    read `number`.
    """

    def __init__(  # noqa: PLR0913 — what it reads, and how
        self,
        store: ObjectStore,
        model: str,
        integrity: Integrity | None,
        timeout_s: float,
        loop: asyncio.AbstractEventLoop,
        *,
        write: bool,
    ) -> None:
        """`write`: this engine also keeps the epoch's object in the store."""
        self.number = 0
        """The largest number that was read. It never becomes smaller."""
        self._store = store
        self._model = model
        self._integrity = integrity
        self._timeout_s = timeout_s
        self._loop = loop
        self._write = write
        self._num_asked = 0
        self._num_answered = -1
        self._is_lost, self._has_read = False, False
        self._wake = asyncio.Event()

    def ask(self) -> int:
        """Have the epoch read soon; return the question, for `has_answered`."""
        self._num_asked += 1
        self._loop.call_soon_threadsafe(self._wake.set)
        return self._num_asked

    def has_answered(self, question: int) -> bool:
        """Return whether a read that began after `question` was asked has ended, successfully."""
        return self._num_answered >= question

    async def read(self) -> str:
        """Read the epoch once. Return why it could not be read, or ""."""
        question = self._num_asked
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await read_epoch(self._store, self._model, self._integrity)
            self._has_read = True
        except StoreDenied as exc:
            if self._has_read:
                return str(exc)
            found = 0  # so S3 answers those who may not list, if there is no object
        except (StoreError, TimeoutError) as exc:
            return str(exc) or f"no answer within {self._timeout_s:g} s"
        self._is_lost = found < self.number
        self.number = max(self.number, found)
        self._num_answered = question  # after the number: another thread reads both
        return ""

    async def read_first(self) -> None:
        """Read the epoch, and log a failure."""
        if why_not := await self.read():
            logger.warning("The epoch of this model cannot be read: %s.", why_not)

    async def start(self) -> "asyncio.Task[None]":
        """Return the task that does `run`."""
        return self._loop.create_task(self.run())

    async def run(self) -> None:
        """Read the epoch every few seconds until cancelled. Raises nothing."""
        read_s, renew_s, is_warned = time.monotonic(), 0.0, False
        while True:
            is_asked = not self.has_answered(self._num_asked)
            pause_s = _RETRY_S if is_asked else READ_EVERY_S * random.uniform(0.8, 1)
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            why_not = await self.read()
            if not why_not:
                read_s, is_warned = time.monotonic(), False
            elif not is_warned and time.monotonic() - read_s >= _WARN_AFTER_S:
                is_warned = True
                logger.warning(
                    "The epoch of this model could not be read for %.0f s: %s. This engine goes "
                    "on in epoch %d; updates of weights in place meanwhile are not noticed.",
                    time.monotonic() - read_s,
                    why_not,
                    self.number,
                )
            if self._write and self.number and (self._is_lost or time.monotonic() >= renew_s):
                renew_s = time.monotonic() + RENEWAL_S
                await self._renew()

    async def _renew(self) -> None:
        self._is_lost = False
        try:
            async with asyncio.timeout(self._timeout_s):
                await write_epoch(self._store, self._model, self.number, self._integrity)
        except (StoreError, TimeoutError) as exc:
            logger.debug("cannot renew the epoch: %s", exc)


class Epochs:
    """Decides whether an engine may share now, and in which namespace.

    Ownership: the thread that submits jobs, which calls `advance` before it decides anything.
    """

    def __init__(self) -> None:
        """Follow no epoch: always share."""
        self.may_share = True
        self.left_out: set[str] = set()
        """Requests that are neither loaded nor saved: they may contain KV of old weights."""
        self.num_stops = 0
        """How often sharing was stopped: by an epoch, or by a reset."""
        self._reader: EpochReader | None = None
        self._record: Record | None = None
        self._number = 0
        self._heard = 0
        self._question: int | None = None
        self._asked_s = 0.0
        self._wait_s = 0.0

    def follow(self, reader: EpochReader, record: Record, wait_s: float) -> None:
        """Share from now on in the epochs of `reader`, and at first in the namespace of `record`.

        `wait_s`: the longest that requests wait for an answer of `reader`.
        """
        self._reader, self._record, self._wait_s = reader, record, wait_s
        self._heard = reader.number

    def reset(self) -> bool:
        """Record that vLLM has reset its cache: share nothing until the epoch was read again.

        Return whether epochs are followed. If not, nothing changes.
        """
        if self._reader is None:
            return False
        self.left_out.clear()
        self.num_stops += 1
        self.may_share, self._question = False, self._reader.ask()
        self._asked_s = time.monotonic()
        return True

    @property
    def must_wait(self) -> bool:
        """Return whether requests shall wait, because the answer will come soon."""
        is_asked = not self.may_share and self._question is not None
        return is_asked and time.monotonic() - self._asked_s < self._wait_s

    def advance(self, close: Callable[[], None], move: Callable[[Record], None]) -> None:
        """Take what was read. Call `close` once nothing may be shared any more, and `move` with the
        record of another namespace to share in from now on."""
        if self._reader is None or self._record is None:
            return
        is_answered = self._question is not None and self._reader.has_answered(self._question)
        number = self._reader.number  # after the answer: another thread writes both
        if self.may_share and number > self._heard:
            self.may_share, self._heard = False, number
            self.num_stops += 1
            logger.warning(
                "The weights of this model are being updated (epoch %d): this engine shares "
                "nothing until its cache is reset, which must follow the update.",
                number,
            )
            close()
        elif is_answered:
            self.may_share, self._question, self._heard = True, None, number
            if number > self._number:
                self._number = number
                record = self._record.in_epoch(number)
                logger.info("shared from now on: epoch %d, namespace %s", number, record.namespace)
                move(record)
