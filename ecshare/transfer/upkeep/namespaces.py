# SPDX-License-Identifier: Apache-2.0
"""Logs the facts in which an engine's namespace differs from others, so that users see why it finds
nothing."""

import logging

from ecshare.store.errors import StoreError
from ecshare.store.keys import Kind
from ecshare.store.manifest import Manifest, differences, list_manifests, nearest, read_manifest
from ecshare.store.objects import ObjectStore
from ecshare.transfer.client.priority import Priority
from ecshare.transfer.client.store_client import StoreClient
from ecshare.transfer.upkeep.renewal import Record

logger = logging.getLogger(__name__)

_WHAT = {Kind.EC: "embeddings", Kind.KV: "KV blocks"}
_SHOWN = 10
# An engine that only reads compares again after 1, 16, 256, ... misses without a hit.
_PATIENCE_GROWTH = 16


class NamespaceWatch:
    """Compares the facts of this engine's namespace with those of the others in its store.

    This happens once at start, and again while an engine that only reads finds nothing: the engine
    that stores may have started later. Ownership: the I/O thread.
    """

    def __init__(self, client: StoreClient, own: Record) -> None:
        self._client = client
        self._own = own
        self._num_misses = 0
        self._next_due = 1
        self._last_sentence = ""

    def is_due(self, *, is_hit: bool) -> bool:
        """Record a hit or a miss of this engine. Return whether to `compare` now."""
        if is_hit:
            self._next_due = 0  # it finds what others store: misses are ordinary from now on
        self._num_misses += not is_hit
        if is_hit or self._num_misses != self._next_due:
            return False
        self._next_due *= _PATIENCE_GROWTH
        return True

    async def compare(self) -> None:
        """Log how the most similar other namespace differs, unless it was logged. Never raises."""
        try:
            known, others = await self._client.ask(self._ask, Priority.SAVE)
            self._log(others, is_known=known)
        except (StoreError, RecursionError) as exc:
            logger.debug("cannot compare namespaces: %s", exc)

    async def _ask(self, store: ObjectStore) -> tuple[bool, list[Manifest]]:
        others = await list_manifests(store, self._own.kind)
        if any(manifest.namespace == self._own.namespace for manifest in others):
            return True, others
        try:
            # If there are very many manifests, only the youngest are listed.
            return await read_manifest(
                store, self._own.kind, self._own.namespace
            ) is not None, others
        except ValueError:  # damaged
            return False, others

    def _log(self, others: list[Manifest], *, is_known: bool) -> None:
        other = nearest(self._own.facts, others)
        if other is None:
            return
        lines = differences(self._own.facts, other.facts)
        fields = {line.partition(":")[0] for line in lines}
        # Two models in one bucket are no mistake.
        is_mistake = not is_known and not {"model", "weights"} <= fields
        sentence = self._sentence(is_known=is_known, lines=lines)
        if sentence != self._last_sentence:
            logger.log(logging.WARNING if is_mistake else logging.INFO, "%s", sentence)
        self._last_sentence = sentence

    def _sentence(self, *, is_known: bool, lines: list[str]) -> str:
        what = _WHAT[self._own.kind]
        if is_known:
            sentence = f"{what} are shared in namespace {self._own.namespace}"
        else:
            sentence = (
                # A manifest is renewed while engines store, and may expire when none does.
                f"no engine has stored {what} in this engine's namespace {self._own.namespace}, at "
                "least not lately; this engine does not find what others store in other namespaces"
            )
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        shown = "".join(f"\n    {line}" for line in [*lines[:_SHOWN], *more])
        differs = "the most similar other namespace differs in (this engine != other)"
        return f"{sentence}; {differs}:{shown}"
