# SPDX-License-Identifier: Apache-2.0
"""The shards of one rank: which object a piece is stored in, and which rank stores it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ecshare.plugin.ranks import Rank
from ecshare.store.keys import Key, Kind, object_key
from kvshare.chunks.layers import LayerSet
from kvshare.chunks.stages import stage_part
from kvshare.messages import Piece


class RankShards:
    """Names the objects that one rank saves and loads. Immutable."""

    def __init__(self, layer_sets: Sequence[LayerSet], rank: Rank) -> None:
        """Name the shards of `rank` for each layer set."""
        self._layer_sets = tuple(layer_sets)
        self._rank = rank
        # Every piece of every step needs these.
        self._own_names = tuple(self._part(each.own_shard_name(rank)) for each in layer_sets)
        self._is_writer = tuple(each.is_written_by(rank) for each in layer_sets)

    @property
    def writes_any(self) -> bool:
        """Whether this rank stores its shard of any layer set."""
        return any(self._is_writer)

    def writes(self, piece: Piece) -> bool:
        """Return whether this rank stores `piece`: one of the ranks with the same heads does."""
        return self._is_writer[piece.layer_set]

    def own_key(self, namespace: str, piece: Piece) -> Key:
        """Return the key under which engines of this size store `piece` for this rank."""
        return object_key(Kind.KV, namespace, bytes(piece.key), self._own_names[piece.layer_set])

    def objects(self, namespace: str, piece: Piece) -> Iterator[tuple[Key, Piece]]:
        """Yield each object that holds heads of this rank, with the part of `piece` in it.

        There are several objects if `piece` is stored in another tensor-parallel size.
        """
        if piece.tp_size is None:
            yield self.own_key(namespace, piece), piece
            return
        layer_set = self._layer_sets[piece.layer_set]
        for shard in layer_set.shard_slices(self._rank, piece.tp_size):
            name = self._part(layer_set.shard_name(shard.number, piece.tp_size))
            key = object_key(Kind.KV, namespace, bytes(piece.key), name)
            yield key, replace(piece, shard=shard)

    def _part(self, name: str) -> str:
        return stage_part(name, self._rank.pp_rank, self._rank.pp_size)

    def is_first_reader(self, piece: Piece) -> bool:
        """Return whether this is the first of the ranks that load the object of `piece`.

        With MLA, all ranks load the same objects. `piece`: as `objects` yields it.
        """
        if piece.shard is not None and piece.shard.heads.first:
            return False
        return self._is_writer[piece.layer_set]
