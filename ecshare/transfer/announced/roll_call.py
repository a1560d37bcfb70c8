# SPDX-License-Identifier: Apache-2.0
"""Asks the store for the objects of many that wait, in one operation."""

import asyncio
from collections.abc import Collection

from ecshare.store.errors import StoreError
from ecshare.store.keys import Key
from ecshare.transfer.client.priority import Priority
from ecshare.transfer.client.store_client import StoreClient

# Those who share a question ask at multiples of this.
_EVERY_S = 0.25


class _Question:
    """What is asked in one operation, and for how many."""

    def __init__(self) -> None:
        self.keys: dict[Key, None] = {}
        self.num_waiting = 0
        self.task: asyncio.Task[Collection[Key]] | None = None


class RollCall:
    """Tells which objects the store has; one operation serves all who ask at one moment.

    To fetch an object that is not there takes several times as much of a core. For one that is
    there this takes a round trip more.

    Ownership: the I/O thread.
    """

    def __init__(self, client: StoreClient) -> None:
        """Use what the engine owns."""
        self._client = client
        self._open: _Question | None = None

    def until_moment_s(self, pause_s: float) -> float:
        """Return the seconds until the last moment within `pause_s` at which others ask too."""
        now_s = asyncio.get_running_loop().time()
        moment_s = (now_s + pause_s) // _EVERY_S * _EVERY_S
        return moment_s - now_s if moment_s > now_s else pause_s

    async def has(self, key: Key, deadline_s: float) -> bool:
        """Return whether the store has `key`; False if it has not said so by `deadline_s`."""
        question = self._open
        if question is None:
            question = self._open = _Question()
            question.task = asyncio.get_running_loop().create_task(self._ask(question))
        assert question.task is not None
        question.keys[key] = None
        question.num_waiting += 1
        try:
            async with asyncio.timeout_at(deadline_s):
                return key in await asyncio.shield(question.task)
        except TimeoutError:
            return False
        finally:
            question.num_waiting -= 1
            if not question.num_waiting:
                question.task.cancel()

    async def _ask(self, question: _Question) -> Collection[Key]:
        """Return which keys the store has; none if it does not say."""
        # All who were woken with the first one have asked: a new task begins after them, and
        # before any of them can stop to wait.
        self._open = None
        keys = list(question.keys)
        try:
            there = await self._client.ask(lambda store: store.exists(keys), Priority.POLL)
        except StoreError:
            return ()
        return {key for key, is_there in zip(keys, there, strict=True) if is_there}
