# SPDX-License-Identifier: Apache-2.0
"""Writes fetched objects to vLLM's cache blocks, on load threads."""

import logging
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ecshare.store.hostcache.cache import HostCache
from ecshare.transfer.device.load_streams import LoadStreams
from ecshare.transfer.device.staging import as_tensor
from ecshare.transfer.jobs import Outcome, StoredObject
from kvshare.messages import Piece
from kvshare.worker.blocks import BlockCaches

logger = logging.getLogger(__name__)

OTHER_LAYOUT = "layout"
"""The reason for a miss if the object's blocks are laid out in another way."""

Target = tuple[Piece, torch.cuda.Event | None]
"""Blocks to write to, and the event in vLLM's stream after which they may be written to."""


class BlockWriter:
    """Checks objects and copies them to blocks, unless it was stopped.

    Blocks are written to only while `wait_idle` blocks and `stop` returns False. Threads: load
    threads call `write`, the worker's main thread calls the rest.
    """

    def __init__(
        self,
        blocks: Sequence[BlockCaches],
        streams: LoadStreams,
        host: HostCache,
        lock: threading.Lock,
    ) -> None:
        """Write to `blocks`, those of each layer set, by `streams`.

        `host`: objects that do not fit their key are removed from it. `lock`: held while targets
        are claimed.
        """
        self._blocks = blocks
        self._streams = streams
        self._host = host
        self._lock = lock
        self._idle = threading.Condition(lock)
        self._num_writing = 0  # load threads
        self._is_stopped = False
        self._has_warned = False

    def write(
        self, piece: Piece, stored: StoredObject, claim: Callable[[], Sequence[Target]]
    ) -> str:
        """Copy `stored` to all targets that `claim` returns. Load threads.

        Return the reason for a miss if the object cannot be used, else "". `piece`: what the object
        should contain. `claim`: called under the lock, if the object can be used.
        """
        tensor, misfit = self._checked(piece, stored)
        if tensor is None:
            return misfit
        with self._lock:
            if self._is_stopped:
                return ""
            targets = claim()
            self._num_writing += 1
        try:
            blocks, order = self._blocks[piece.layer_set], stored.spec.attributes["order"]
            for target, begun in targets:
                with self._streams.after(begun) as stream:
                    blocks.write(target, tensor, order, stream, stored.read)
        finally:
            with self._idle:
                self._num_writing -= 1
                self._idle.notify_all()
        return ""

    def stop(self) -> bool:
        """Begin no further copy; return whether none is under way."""
        with self._lock:
            self._is_stopped = True
            return not self._num_writing

    def wait_idle(self) -> None:
        """Block until no copy is under way."""
        with self._idle:
            self._idle.wait_for(lambda: not self._num_writing)

    def _checked(self, piece: Piece, stored: StoredObject) -> tuple[Tensor | None, str]:
        """Return the tensor of `stored`, or the reason for a miss: an object whose checksum is
        right may still contain something else than its key says."""
        blocks = self._blocks[piece.layer_set]
        if blocks.can_use(stored.spec, piece):
            tensor = as_tensor(stored.payload, stored.spec)
            if blocks.is_sound(tensor):
                return tensor, ""
        elif blocks.has_another_layout(stored.spec, piece):
            self._warn_of_layout(stored)
            return None, OTHER_LAYOUT
        logger.warning(
            "%s contains a tensor that does not fit its key: %s", stored.key, stored.spec
        )
        # Make room for the object that is computed and saved instead.
        self._host.discard(stored.key)
        return None, Outcome.CORRUPT.value

    def _warn_of_layout(self, stored: StoredObject) -> None:
        """Log once that other engines lay out their blocks in another way."""
        with self._lock:
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            logger.warning(
                "%s was stored by an engine that lays out its KV blocks in another way. This "
                "engine does not use such objects. Set another `epoch` for engines of each kind.",
                stored.key,
            )
