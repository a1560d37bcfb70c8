# SPDX-License-Identifier: Apache-2.0
"""The content of LoRA adapters when this engine first read their files."""

import logging
from collections.abc import Hashable
from functools import lru_cache
from pathlib import Path

from ecshare.plugin.weights import fingerprint

logger = logging.getLogger(__name__)


class AdapterContents:
    """Detects adapters whose files have changed.

    The engine's memory may still have the old weights, and its caches results of them.

    Ownership: one thread.
    """

    def __init__(self) -> None:
        """Begin without adapters."""
        # One fingerprint for each adapter that was ever loaded; None: its files have changed.
        self._known: dict[Hashable, str | None] = {}

    def learn(self, name: Hashable, content: str) -> bool:
        """Record the fingerprint of the adapter `name`. Return whether it is the same as before."""
        known = self._known.setdefault(name, content)
        if known is not None and known != content:
            self._known[name] = None
            logger.warning(
                "The files of LoRA adapter %s have changed since this engine first read them. "
                "Nothing computed with it is shared until the engine restarts. Load changed "
                "weights %s.",
                name,
                "from a new path" if isinstance(name, tuple) else "under a new name",
            )
        return known == content

    def are_still(self, name: Hashable, content: str) -> bool:
        """Return whether `content` was recorded for the adapter, and has not changed since."""
        return self._known.get(name) == content


def adapter_fingerprint(folder: Path) -> str:
    """Return a fingerprint of the content of the LoRA adapter in `folder`; "" if it is unreadable.

    The name is not enough: adapters are trained further and loaded again under the same name. Reads
    files, unless they have not changed since the last call. Any thread except vLLM's.
    """
    try:
        files = tuple(
            (entry.name, entry.stat().st_size, entry.stat().st_mtime_ns)
            for entry in sorted(folder.iterdir())
        )
        return _adapter_fingerprint(folder, files)
    except (OSError, ValueError, KeyError) as exc:
        logger.warning(
            "Cannot read the LoRA adapter %s (%s): nothing computed with it is shared.",
            folder,
            exc,
        )
        return ""


@lru_cache(maxsize=256)
def _adapter_fingerprint(folder: Path, files: tuple[tuple[str, int, int], ...]) -> str:
    """Fingerprint `folder`. `files` (names, sizes, times) makes each version a cache key."""
    if not files:
        raise FileNotFoundError("the folder is empty")
    return fingerprint(folder)
