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


@dataclass(frozen=True, slots=True)
class Piece:
    """The stored part of one chunk for one layer set, and the cache blocks from or to which it is
    copied."""

    key: ChunkKey
    num_blocks: int
    """That are stored."""
    num_tokens: int
    """The number of valid tokens; the rest of the last block is not valid."""
    block_ids: tuple[tuple[int, ...], ...]
    """Of consecutive stored blocks, in each cache group of the layer set; all blocks for a save."""
    first_block: int = 0
    """Which stored block the first of `block_ids` is."""
    layer_set: int = 0
    tp_size: int | None = None
    """The tensor-parallel size that it is stored in (see shards.py); None: this engine's own."""
    shard: ShardSlice | None = None
    """Which heads to use, and where they are; None: all heads of this rank. The worker sets it, and
    may make several pieces of one that is stored in another size."""

    @property
    def num_held(self) -> int:
        """How many of the stored blocks have `block_ids`."""
        return len(self.block_ids[0])


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Fill these blocks from the store, then report `request_id`, once."""

    request_id: str
    pieces: tuple[Piece, ...]
    is_announced: bool = False
    """Another engine computes them now: the load waits for them, in their order."""


@dataclass(frozen=True)
class Orders(KVConnectorMetadata):
    """Scheduler half -> worker half, once a step."""

    namespace: str
    loads: tuple[LoadOrder, ...] = ()
    abandoned: tuple[str, ...] = ()
    """Requests that have ended, whose loads must end now."""
    saves: tuple[Piece, ...] = ()
    """To be copied out of the cache after this step's forward pass."""
    leaving: tuple[Piece, ...] = ()
    """To be copied out before this step's forward pass: vLLM has freed their blocks, and requests
    of this step may fill them."""
    refused: frozenset[str] = frozenset()
    """Requests that vLLM was promised a load for, and that get none: to be reported as failed."""
    is_idle: bool = False
    """This step computes nothing."""


@dataclass(frozen=True)
class Report(KVConnectorWorkerMetadata):
    """Worker half -> scheduler half, when there is something to say."""

    lost: frozenset[ChunkKey]
    """Not in the store, though a save or a load was ordered: to be saved when next seen."""
    is_idle: bool = False
    """This worker can neither save nor load: its cache has a layout it does not understand, or it
    has given up after a bug."""
    ended: Mapping[ChunkKey, int] = field(default_factory=dict)
    """For how many of their objects the save has ended, successfully or not."""
    saves_fail: bool = False
    """The store has refused saves repeatedly, and they are paused. Said in each step until a save
    works again."""
    not_saved: frozenset[ChunkKey] = frozenset()
    """Those of `lost` whose save has failed. The others were missed by loads. A load hears of some
    of them after it has ended, when they may be computed and on their way to the store again."""
    has_misfits: bool = False
    """Some of what was lost is in the store, and laid out in another way."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Report":
        """Return the report of both workers: a chunk is stored only if all its shards are.

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


def announcement(num_tokens: int, tp_size: int) -> dict[str, Any]:
    """Return the `kv_transfer_params` that say: the first `num_tokens` are, or will be, stored.

    `tp_size`: the tensor-parallel size in which this engine stores them; see shards.py.
    """
    return {"kvshare": {"num_tokens": num_tokens, "size": tp_size}}


def is_for_decode(request: "Request") -> bool:
    """Whether a router or another coordinator says that another engine goes on with this prompt.

    Our router says so by `kvshare`, others in words of vLLM's. Either may come from a client: then
    no more follows than from a client's `kvshare_save`.
    """
    params: Any = request.kv_transfer_params
    if not isinstance(params, dict):
        return False
    return params.get("do_remote_decode") is True or _announced(request).get("for_decode") is True


def wants_announcement(request: "Request") -> bool:
    """Whether somebody who sent `request` is to be told what of its prompt is stored: one who knows
    our fields, or vLLM's for a prompt that goes on elsewhere."""
    params: Any = request.kv_transfer_params
    knows_ours = isinstance(params, dict) and isinstance(params.get("kvshare"), dict)
    return knows_ours or is_for_decode(request)


def announced_tp_size(request: "Request") -> int:
    """Return the announced tensor-parallel size; 0 if there is none, or it is invalid.

    It may come from a client: the caller must check that it is possible.
    """
    size = _announced(request).get("size")
    return size if isinstance(size, int) and not isinstance(size, bool) else 0


def announced_tokens(request: "Request") -> int:
    """Return the number of announced tokens of `request`; 0 if there are none, or it is invalid.

    docs/format.md has the two forms. They may come from a client. A false one makes only this
    request wait, for `wait_s`.
    """
    ours = _announced(request)
    if len(ours.keys() - {"size"}) != 1:
        return 0
    if ours.get("streamed") is True:
        return request.num_prompt_tokens - 1
    num_tokens = ours.get("num_tokens")
    if not isinstance(num_tokens, int) or isinstance(num_tokens, bool):
        return 0
    return num_tokens if 0 < num_tokens < request.num_prompt_tokens else 0


def _announced(request: "Request") -> dict[Any, Any]:
    """Return our part of the request's `kv_transfer_params`, unchecked; empty: there is none."""
    params: Any = request.kv_transfer_params
    if not isinstance(params, dict):
        return {}
    ours = params.get("kvshare")
    if ours is None and _is_prefilled_for_storage(params):
        return {"streamed": True}
    return ours if isinstance(ours, dict) else {}


def is_prefilled_elsewhere(request: "Request") -> bool:
    """Whether the request says where P is: another connector is to fetch the prompt from there.

    One that takes the request sets `do_remote_prefill` to false, as vLLM's own do.
    """
    params: Any = request.kv_transfer_params
    return (
        isinstance(params, dict)
        and params.get("do_remote_prefill") is True
        and _names_source(params)
    )


def _is_prefilled_for_storage(params: dict[Any, Any]) -> bool:
    """Whether a coordinator says that the prompt was prefilled, and D is to find it in a store."""
    return params.get("do_remote_prefill") is True and not _names_source(params)


def _names_source(params: dict[Any, Any]) -> bool:
    return any(
        isinstance(name, str) and name.startswith("remote_") and value is not None
        for name, value in params.items()
    )
