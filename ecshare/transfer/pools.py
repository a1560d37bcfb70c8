# SPDX-License-Identifier: Apache-2.0
"""Threads for work that would block the I/O thread."""

import logging
import os
from collections.abc import Callable

from ecshare.store.threads import Workers

logger = logging.getLogger(__name__)

# Sealing, checking and publishing are copies at memory speed; two threads keep the loop free.
_NUM_THREADS = 2
# Loads are waited for. On a large host four threads copy twice as much.
_NUM_LOAD_THREADS = 4 if (os.cpu_count() or 1) >= 16 else _NUM_THREADS


class Pools:
    """Threads for saves and threads for loads, so that no load waits for saves.

    Each thread first calls the owner's `on_thread_start`. Any thread may use them.
    """

    def __init__(self, on_thread_start: Callable[[], object] | None) -> None:
        """Start no thread yet. `on_thread_start`: called first in each thread."""
        self._on_thread_start = on_thread_start
        self.copies = self._pool("ecshare-copy", _NUM_THREADS)
        """Seal, publish and pack objects to be saved; also run the `work` of Run jobs."""
        self.loads = self._pool("ecshare-load", _NUM_LOAD_THREADS)
        """Verify, publish and use loaded objects."""

    def begin_thread(self) -> None:
        """Call `on_thread_start` in the calling thread, which serves even if that fails."""
        if self._on_thread_start is None:
            return
        try:
            self._on_thread_start()
        except Exception:  # noqa: BLE001 — without the I/O thread nothing would ever end
            logger.exception("a thread could not be set up")

    def close(self) -> None:
        """Drop queued work, and accept no more. Does not wait for work that has begun."""
        for pool in (self.copies, self.loads):
            pool.shutdown(wait=False, cancel_futures=True)

    def _pool(self, name: str, num_threads: int) -> Workers:
        return Workers(num_threads, name, self.begin_thread)
