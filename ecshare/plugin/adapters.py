# SPDX-License-Identifier: Apache-2.0
"""What LoRA adapters contained when this engine first read their files."""

import logging
from collections.abc import Hashable

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
