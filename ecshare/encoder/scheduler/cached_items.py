# SPDX-License-Identifier: Apache-2.0
"""The items in vLLM's encoder cache."""

from ecshare.plugin.compat import num_encoder_resets
from ecshare.store.recent import Recent

# Far more items than vLLM's encoder cache has room for.
_MAX_CACHED = 10_000


class CachedItems(Recent[str, int]):
    """The numbers of embeddings of these items, as far as vLLM reports the cache's contents.

    Empty on producers, which look up each item in order to store or announce it.
    """

    def __init__(self) -> None:
        super().__init__(_MAX_CACHED)
        self._num_resets = num_encoder_resets()

    def take_reset(self) -> bool:
        """Return whether vLLM has reset the cache since the last call; forget its items then."""
        before, self._num_resets = self._num_resets, num_encoder_resets()
        if before == self._num_resets:
            return False
        self.clear()
        return True
