# SPDX-License-Identifier: Apache-2.0
"""An event loop that does not wait for timers: it advances its clock instead.

Use it only for code without threads and I/O, such as `ThrottledStore`: the clock waits for neither.
"""

import asyncio
import selectors
from typing import Any


class _Skipping(selectors.SelectSelector):
    """Returns at once, and adds up the time that it should have waited."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        """See selectors.BaseSelector."""
        self.now_s += timeout or 0.0
        return super().select(0)


class CountedTime(asyncio.SelectorEventLoop):
    """An event loop that runs timers at once, in their order. Its clock starts at 0."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        """Return the simulated seconds since the start."""
        return self._skipping.now_s
