# SPDX-License-Identifier: Apache-2.0
"""Stops look-ups for a while where nothing that is found can be loaded."""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

_MOST_IN_A_ROW = 8
_PAUSE_S = 60.0


class Misfits:
    """Counts reports in a row that what was loaded is laid out in another way than this engine's.

    How blocks are laid out is a fact of objects and not of their names, so a look-up finds those of
    engines with other kernels too. Each is then read for nothing.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        """`clock_s`: monotonic seconds."""
        self._clock_s = clock_s
        self._num_in_a_row = 0
        self._until_s = 0.0
        self._is_told = False

    @property
    def is_pause(self) -> bool:
        """Whether nothing is to be looked up now. After a pause it is tried again."""
        return self._clock_s() < self._until_s

    def reported(self, has_misfits: bool) -> None:
        """Take note of one more report, if it `has_misfits`."""
        self._num_in_a_row += has_misfits
        if not has_misfits or self._num_in_a_row < _MOST_IN_A_ROW:
            return
        self._until_s = self._clock_s() + _PAUSE_S
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "All KV that is found was stored by engines that lay out their blocks in another "
                "way. This engine looks for KV once in %.0f s until it finds some that it can use. "
                "Set another `epoch` for engines of each kind.",
                _PAUSE_S,
            )

    def end(self) -> None:
        """Take note that something could be loaded."""
        self._num_in_a_row = 0
        self._until_s = 0.0
