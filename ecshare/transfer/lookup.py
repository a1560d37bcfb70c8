# SPDX-License-Identifier: Apache-2.0
"""Finds where objects are stored: in the host cache, in the store, or nowhere."""

from collections.abc import Sequence
from typing import Any

from ecshare.store.hostcache.cache import HostCache
from ecshare.store.keys import Key
from ecshare.transfer.client.priority import Priority
from ecshare.transfer.client.store_client import StoreClient
from ecshare.transfer.jobs import Lookup, MultiLookup, Tier


class Locator:
    """Serves Lookup and MultiLookup jobs. Ownership: the I/O thread."""

    def __init__(self, host: HostCache, client: StoreClient) -> None:
        """Use what the engine owns."""
        self._host = host
        self._client = client

    async def look_up(self, job: Lookup, deadline_s: float) -> tuple[bool, ...]:
        """Return the job's result.

        Raises:
            StoreError, TimeoutError: the store did not answer by `deadline_s`.
        """
        where = await self._where(job.keys, deadline_s, store_only=job.store_only)
        return tuple(tier is not None for tier in where)

    async def look_up_in_rounds(self, job: MultiLookup[Any], deadline_s: float) -> Any:
        """Look up keys round by round, and return the result of the job's generator.

        Raises:
            StoreError, TimeoutError: as `look_up`.
        """
        questions = job.questions()
        answers: Any = None  # sending None starts the generator
        while True:
            try:
                keys = questions.send(answers)
            except StopIteration as end:
                return end.value
            answers = await self._where(keys, deadline_s)

    async def _where(
        self, wanted: Sequence[Key], deadline_s: float, *, store_only: bool = False
    ) -> tuple[Tier | None, ...]:
        found: dict[Key, Tier | None] = dict.fromkeys(wanted)
        if not store_only:
            for key in found:
                entry = self._host.open(key)
                if entry is not None:
                    found[key] = Tier.HOST
                    entry.close()
        keys = [key for key, tier in found.items() if tier is None]
        if keys:
            are_stored = await self._client.ask(
                lambda store: store.exists(keys), Priority.LOOK_UP, 0, deadline_s
            )
            for key, is_stored in zip(keys, are_stored, strict=True):
                is_sound = is_stored and not self._client.damaged.is_quarantined(key)
                found[key] = Tier.STORE if is_sound else None
        return tuple(found[key] for key in wanted)
