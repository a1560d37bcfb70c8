# SPDX-License-Identifier: Apache-2.0
"""Which models decode serves, as far as is known. A slow list delays nobody."""

import asyncio
from collections.abc import Awaitable, Callable

Headers = dict[str, str]

_FRESH_S = 5.0
_FRESH_FOR_REFUSAL_S = 1.0  # so that an adapter loaded just now is found
_MAX_WAIT_S = 1.0


class ServedModels:
    """The models that decode listed last. The list is refreshed in the background.

    A listed model passes at once, however old the list is. Any other model waits for one refresh,
    for a limited time, and not at all after a refresh that failed or was slow. Belongs to the event
    loop's thread.
    """

    def __init__(
        self,
        read: Callable[[Headers], Awaitable[frozenset[str] | None]],
        clock_s: Callable[[], float],
    ) -> None:
        """`read` asks decode with a client's headers. It returns None if decode does not tell, and
        never raises.
        """
        self._read = read
        self._clock_s = clock_s
        self._models: frozenset[str] = frozenset()
        self._began_s = float("-inf")
        self._is_current = False  # the last read has ended and returned a list
        self._is_prompt = True
        self._reading: asyncio.Task[None] | None = None

    async def lacks(self, model: str, headers: Headers) -> bool:
        """Tell whether decode has just stated that it does not serve `model`."""
        if model in self._models:
            self._refresh(headers, _FRESH_S)
            return False
        self._refresh(headers, _FRESH_FOR_REFUSAL_S)
        if self._reading is not None and self._is_prompt:
            done, _ = await asyncio.wait((self._reading,), timeout=_MAX_WAIT_S)
            self._is_prompt = self._is_prompt and bool(done)
        return self._is_current and model not in self._models

    async def close(self) -> None:
        """Cancel a refresh in progress."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))

    def _refresh(self, headers: Headers, age_s: float) -> None:
        """Start to read the list if the last read started at least `age_s` ago and has ended."""
        is_reading = self._reading is not None and not self._reading.done()
        if not is_reading and self._clock_s() - self._began_s >= age_s:
            self._began_s = self._clock_s()
            self._is_current = False
            self._reading = asyncio.create_task(self._update(headers))

    async def _update(self, headers: Headers) -> None:
        models = await self._read(headers)
        self._is_current = self._is_prompt = models is not None
        self._models = self._models if models is None else models
