# SPDX-License-Identifier: Apache-2.0
"""Which clients the engines accept. The router downloads media for no others."""

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Mapping

from ecshare.router.api.errors import EngineError, RefusalError
from ecshare.router.fleet.tasks import end_all
from ecshare.store.recent import Recent

Headers = Mapping[str, str]

FRESH_S = 10.0
KEPT_S = 300.0
MAX_KNOWN = 4096


class KnownClients:
    """Remembers the credentials (Authorization headers) that decode accepted, as hashes.

    A known client passes at once, and its credential is checked again in the background. Refusals
    are not remembered. Belongs to the event loop's thread.
    """

    def __init__(
        self, ask: Callable[[Headers], Awaitable[None]], clock_s: Callable[[], float]
    ) -> None:
        """`ask` asks decode with a client's headers.

        It raises RefusalError if decode refuses them, and EngineError if decode does not tell.
        """
        self._ask = ask
        self._clock_s = clock_s
        self._accepted_s: Recent[bytes, float] = Recent(MAX_KNOWN)
        self._asking: dict[bytes, asyncio.Task[None]] = {}

    async def check(self, headers: Headers) -> None:
        """Return if the engines would serve a client with these headers.

        Raises:
            RefusalError: decode refuses them.
            EngineError: decode does not tell.
        """
        key = hashlib.sha256(headers.get("Authorization", "").encode()).digest()
        age_s = self._clock_s() - self._accepted_s.get(key, float("-inf"))
        if age_s >= KEPT_S:
            await self._update(key, headers)
        elif age_s >= FRESH_S and key not in self._asking:
            self._asking[key] = asyncio.create_task(self._refresh(key, headers))

    async def close(self) -> None:
        """Cancel the checks in progress."""
        await end_all(self._asking.values())

    async def _refresh(self, key: bytes, headers: Headers) -> None:
        try:
            with contextlib.suppress(EngineError, RefusalError):
                await self._update(key, headers)
        finally:
            del self._asking[key]

    async def _update(self, key: bytes, headers: Headers) -> None:
        try:
            await self._ask(headers)
        except RefusalError:
            self._accepted_s.pop(key, None)
            raise
        self._accepted_s[key] = self._clock_s()
