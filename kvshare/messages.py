# SPDX-License-Identifier: Apache-2.0
"""Messages between the two halves of a connector, and between the connectors of two engines."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvshare.chunks.prefix import ChunkKey
from kvshare.chunks.shards import ShardSlice

if TYPE_CHECKING:
    from vllm.v1.request import Request

# A request that names more media as new is not believed: the list is a client's, if no router
# checks it.
_MOST_NEW_MEDIA = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a chunk for one layer set, and the cache blocks that it is copied from or to."""

    key: ChunkKey
    num_blocks: int
    """The number of stored blocks."""
    num_tokens: int
    """The number of valid tokens; the rest of the last block is not valid."""
    block_ids: tuple[tuple[int, ...], ...]
    """For each cache group of the layer set, the ids of consecutive stored blocks: all of them for
    a save, those to be filled for a load."""
    first_block: int = 0
    """The position among the stored blocks of the first block in `block_ids`."""
    layer_set: int = 0
    tp_size: int | None = None
    """The tensor-parallel size in which it is stored (see shards.py); None: this engine's own."""
    shard: ShardSlice | None = None
    """The heads to use and their shard; None: all heads of this rank. The worker sets it. It splits
    a piece that is stored in another size into one piece per shard."""

    @property
    def num_held(self) -> int:
        """The number of stored blocks that have `block_ids`."""
        return len(self.block_ids[0])


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """An order to fill blocks from the store and then to report `request_id`, once."""

    request_id: str
    pieces: tuple[Piece, ...]
    is_announced: bool = False
    """True if another engine computes the pieces now: the load waits for them, in their order."""


@dataclass(frozen=True)
class Orders(KVConnectorMetadata):
    """Scheduler half -> worker half, once a step."""

    namespace: str
    loads: tuple[LoadOrder, ...] = ()
    abandoned: tuple[str, ...] = ()
    """Requests that have ended: their loads must be cancelled now."""
    saves: tuple[Piece, ...] = ()
    """Pieces to copy out of the cache after this step's forward pass."""
    leaving: tuple[Piece, ...] = ()
    """Pieces to copy out before this step's forward pass: vLLM has freed their blocks, and requests
    of this step may fill them."""
    refused: frozenset[str] = frozenset()
    """Requests with a promised load that will not happen: the worker reports it as failed."""
    is_idle: bool = False
    """True if this step computes nothing."""
    kinds: str = ""
    """The kinds of the scheduler half's layer sets, which pieces name by number. The scheduler half
    knows the first pipeline stage only, and another one may have others. Empty: without stages."""


@dataclass(frozen=True)
class Report(KVConnectorWorkerMetadata):
    """Worker half -> scheduler half, in steps with something to report."""

    lost: frozenset[ChunkKey]
    """Chunks that are not in the store, though a save or a load of them was ordered. They are saved
    again when a request next contains them."""
    is_idle: bool = False
    """True if this worker neither saves nor loads: its cache has an unknown layout, or it has given
    up after a bug."""
    ended: Mapping[ChunkKey, int] = field(default_factory=dict)
    """For each chunk, the number of its objects whose save has ended, successfully or not."""
    saves_fail: bool = False
    """True while saves are paused, because the store has refused them repeatedly. Reported in each
    step until a save succeeds."""
    not_saved: frozenset[ChunkKey] = frozenset()
    """The chunks of `lost` whose save failed. The others are misses of loads. A miss may be
    reported after its load has ended, when the chunk may already be computed and saved again."""
    has_misfits: bool = False
    """True if some of the lost chunks are in the store, in another layout."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Report":
        """Return the combined report: a chunk is stored only if all its shards are.

        Raises:
            TypeError: `other` is not a Report.
        """
        if not isinstance(other, Report):
            raise TypeError(f"cannot add a {type(other).__name__} to a Report")
        ended = Counter(self.ended) + Counter(other.ended)
        return Report(
            self.lost | other.lost,
            self.is_idle or other.is_idle,
            ended,
            self.saves_fail or other.saves_fail,
            self.not_saved | other.not_saved,
            self.has_misfits or other.has_misfits,
        )


def announcement(num_tokens: int, tp_size: int, num_stages: int = 1) -> dict[str, Any]:
    """Return the `kv_transfer_params` that announce the first `num_tokens`: stored, or being saved.

    `tp_size`: the tensor-parallel size in which this engine stores them; see shards.py.
    `num_stages`: of its pipeline.
    """
    stages = {"stages": num_stages} if num_stages > 1 else {}
    return {"kvshare": {"num_tokens": num_tokens, "size": tp_size, **stages}}


def is_for_decode(request: "Request") -> bool | None:
    """Return whether a coordinator says that another engine takes this prompt's KV from the store.

    None: it does not say. Our router says so in the field `kvshare`, others in vLLM's fields, where
    ours counts more: with False the other engine fetches the KV by another connector. A client may
    send either: then the effect is no larger than that of a client's `kvshare_save`.
    """
    params: Any = request.kv_transfer_params
    if not isinstance(params, dict):
        return None
    said = _announced(request).get("for_decode")
    if isinstance(said, bool):
        return said
    return True if params.get("do_remote_decode") is True else None


def wants_announcement(request: "Request") -> bool:
    """Return whether the answer to `request` is to announce which tokens of its prompt are stored.

    True if the sender uses our fields, or vLLM's for a prompt that another engine decodes.
    """
    params: Any = request.kv_transfer_params
    knows_ours = isinstance(params, dict) and isinstance(params.get("kvshare"), dict)
    return knows_ours or is_for_decode(request) is True


def num_old_tokens(request: "Request") -> int:
    """Return how many tokens of `request` come before its first new media item.

    A router names the items that no store had when an encoder was asked for them, so no engine can
    have stored KV of the tokens after one. A client may name any: then its request computes what it
    could load. What a request has computed itself before vLLM preempted it counts as old.
    """
    names = _announced(request).get("new_media")
    if not isinstance(names, list) or len(names) > _MOST_NEW_MEDIA or request.num_preemptions:
        return request.num_tokens
    new = {name for name in names if isinstance(name, str)}
    starts = (each.mm_position.offset for each in request.mm_features if each.identifier in new)
    return min(starts, default=request.num_tokens)


def announced_tp_size(request: "Request") -> int:
    """Return the announced tensor-parallel size; 0 if there is none, or it is invalid.

    A client may have sent it: the caller must check that the size is possible.
    """
    size = _announced(request).get("size")
    return size if isinstance(size, int) and not isinstance(size, bool) else 0


def announced_tokens(request: "Request", num_stages: int = 1) -> int:
    """Return the number of announced tokens of `request`; 0 if there are none, or it is invalid.

    `num_stages`: of this engine's pipeline. What others store, it cannot load and does not await.
    docs/format.md describes the two forms. A client may send either. A false announcement makes
    only this request wait, for `wait_s` at most.
    """
    ours = _announced(request)
    if len(ours.keys() - {"size", "stages"}) != 1:
        return 0
    if ours.get("streamed") is True:
        return request.num_prompt_tokens - 1
    if ours.get("stages", 1) != num_stages:
        return 0
    num_tokens = ours.get("num_tokens")
    if not isinstance(num_tokens, int) or isinstance(num_tokens, bool):
        return 0
    return num_tokens if 0 < num_tokens < request.num_prompt_tokens else 0


def _announced(request: "Request") -> dict[Any, Any]:
    """Return our part of the request's `kv_transfer_params`, unchecked; empty if there is none."""
    params: Any = request.kv_transfer_params
    if not isinstance(params, dict):
        return {}
    ours = params.get("kvshare")
    if ours is None and _is_prefilled_for_storage(params):
        return {"streamed": True}
    return ours if isinstance(ours, dict) else {}


def is_prefilled_elsewhere(request: "Request") -> bool:
    """Return whether the request names P as its source: another connector fetches the KV from P.

    A connector that takes the request sets `do_remote_prefill` to false, as vLLM's own do.
    """
    params: Any = request.kv_transfer_params
    return (
        isinstance(params, dict)
        and params.get("do_remote_prefill") is True
        and _names_source(params)
    )


def _is_prefilled_for_storage(params: dict[Any, Any]) -> bool:
    """Return whether a coordinator says that the prompt was prefilled and its KV is in a store."""
    return params.get("do_remote_prefill") is True and not _names_source(params)


def _names_source(params: dict[Any, Any]) -> bool:
    return any(
        isinstance(name, str) and name.startswith("remote_") and value is not None
        for name, value in params.items()
    )
