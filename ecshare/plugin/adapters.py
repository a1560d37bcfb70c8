# SPDX-License-Identifier: Apache-2.0
"""What LoRA adapters contained when this engine first read their files."""

import logging
from collections.abc import Hashable
from functools import lru_cache
from pathlib import Path

from ecshare.plugin.weights import fingerprint

logger = logging.getLogger(__name__)


class AdapterContents:
    """Tells adapters whose files have changed: nobody can say whether the engine's memory holds the
    former weights, and its caches may hold what was computed with them.

    Ownership: one thread.
    """

    def __init__(self) -> None:
        """Know none."""
        # One entry for each that was ever loaded; None: it has changed.
        self._known: dict[Hashable, str | None] = {}

    def learn(self, name: Hashable, content: str) -> bool:
        """Take note of the fingerprint of what vLLM calls `name`; whether it is as before."""
        known = self._known.setdefault(name, content)
        if known is not None and known != content:
            self._known[name] = None
            logger.warning(
                "The files of LoRA adapter %s have changed since this engine first read them: what "
                "is computed with it is not shared until the engine starts again. Load changed "
                "weights %s.",
                name,
                "from a new path" if isinstance(name, tuple) else "under a new name",
            )
        return known == content

    def are_still(self, name: Hashable, content: str) -> bool:
        """Whether it has not changed since this was learnt."""
        return self._known.get(name) == content


def adapter_fingerprint(folder: Path) -> str:
    """Return what identifies the LoRA adapter in `folder` by its content; "" if that is unknown.

    Its name does not: adapters are trained further and loaded again under the same name. Reads
    files unless they are as they were the last time; any thread but vLLM's.
    """
    try:
        files = tuple(
            (entry.name, entry.stat().st_size, entry.stat().st_mtime_ns)
            for entry in sorted(folder.iterdir())
        )
        return _adapter_fingerprint(folder, files)
    except (OSError, ValueError, KeyError) as exc:
        logger.warning(
            "Cannot read the LoRA adapter %s (%s): what is computed with it is not shared.",
            folder,
            exc,
        )
        return ""


@lru_cache(maxsize=256)
def _adapter_fingerprint(folder: Path, files: tuple[tuple[str, int, int], ...]) -> str:
    """Fingerprint `folder`; `files` (names, sizes, times) is there to tell its versions apart."""
    if not files:
        raise FileNotFoundError("the folder is empty")
    return fingerprint(folder)
