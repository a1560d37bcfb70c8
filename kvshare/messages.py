# SPDX-License-Identifier: Apache-2.0
"""What passes between the scheduler half and the worker half."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvshare.prefix import ChunkKey


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of a request and the cache block that holds it, or is to hold it."""

    key: ChunkKey
    num_tokens: int
    """Tokens of the block that the chunk vouches for; the rest of the block is noise."""
    block_id: int


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Fill these blocks from the store, then report `request_id`, once."""

    request_id: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Orders(KVConnectorMetadata):
    """Scheduler half -> worker half, once a step."""

    namespace: str
    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[Piece, ...] = ()
    """To be copied out of the cache after this step's forward pass."""


@dataclass(frozen=True)
class Report(KVConnectorWorkerMetadata):
    """Worker half -> scheduler half, when there is something to say."""

    lost: frozenset[ChunkKey]
    """Ordered to be saved or loaded, but not in the store: to be saved when next seen."""
    is_idle: bool = False
    """This worker can neither save nor load: its cache has a layout it does not understand."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Report":
        """Return the report of both workers: a chunk is whole only if every share of it is."""
        if not isinstance(other, Report):
            raise TypeError(f"cannot add a {type(other).__name__} to a Report")
        return Report(self.lost | other.lost, self.is_idle or other.is_idle)
