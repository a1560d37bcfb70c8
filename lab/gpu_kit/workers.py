# SPDX-License-Identifier: Apache-2.0
"""The worker halves of both connectors, each with a device, a store in a folder and a host cache.

They are driven as vLLM drives them: in torch's inference mode, in which it makes steps. Call
`provide` of vllm_names before.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from ecshare.encoder import messages as ec
from ecshare.encoder.config import EncoderConfig
from ecshare.encoder.worker import EncoderWorker
from ecshare.plugin.ranks import Rank
from ecshare.store.keys import Key, Kind, object_key
from ecshare.transfer.device.devices import device_selector
from ecshare.transfer.engine import TransferEngine
from kvshare.chunks.layers import AttentionWindow, LayerSet
from kvshare.chunks.prefix import ChunkKey
from kvshare.config import KVConfig
from kvshare.messages import LoadOrder, Orders, Piece
from kvshare.worker.layout_check import LayoutCheck
from kvshare.worker.loads import Finished
from kvshare.worker.worker import CacheShape, KVWorker
from lab.gpu_kit.kit import Bench, wait_until
from lab.gpu_kit.layouts import Sizes

NAMESPACE = "0" * 32
MIB = 1 << 20


class CacheRefused(Exception):
    """The worker half refuses to share its cache."""


class Kernels:
    """Attention layers for a worker to try: they write keys and values to their caches."""

    def __init__(self, *, misplaced: int = 0) -> None:
        """`misplaced`: the distance, in slots, from the right slot to the one written."""
        self._misplaced = misplaced

    def check(self, caches: Mapping[str, Tensor]) -> LayoutCheck:
        """Return a worker's check of these layers. `caches`: [block, head, token, content]."""
        layers = {name: self._layer(cache) for name, cache in caches.items()}
        return LayoutCheck(layers, next(iter(caches.values())).dtype, "the kit")

    def _layer(self, cache: Tensor) -> Any:  # noqa: ANN401 — what is asked of vLLM's Attention
        size = cache.shape[3] // 2
        backend = SimpleNamespace(forward_includes_kv_cache_update=False, get_name=lambda: "torch")
        return SimpleNamespace(
            impl=SimpleNamespace(do_kv_cache_update=self._update),
            get_attn_backend=lambda: backend,
            num_kv_heads=cache.shape[1],
            head_size=size,
            head_size_v=size,
            kv_cache=cache,
        )

    def _update(
        self, layer: object, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor
    ) -> None:
        """Write [slot, head, element] to `slots`, by operations on the device alone."""
        block_tokens = cache.shape[2]
        slots = slots + self._misplaced
        cache[slots // block_tokens, :, slots % block_tokens] = torch.cat((keys, values), dim=2)


class KVHost:
    """One rank of an engine that shares KV: its worker half over `cache`."""

    def __init__(  # noqa: PLR0913 — all that can differ between two of them
        self,
        bench: Bench,
        cache: Tensor,
        store: Path,
        *,
        host_cache: Path | None = None,
        buffer_bytes: int = 64 * MIB,
        rank: int = 0,
        tp_size: int = 1,
        stored_dtype: Literal["auto", "fp8"] = "auto",
        kernels: Kernels | None = None,
    ) -> None:
        """`cache`: [layer, block, head, token, content], of this rank's heads. `kernels`: the
        layers of the engine, which the worker tries; None: it has none to try.

        Raises:
            CacheRefused: the worker half refuses to share the cache.
        """
        self.cache = cache
        num_layers, num_blocks, num_heads, block_tokens, _ = cache.shape
        names = [f"layers.{number}" for number in range(num_layers)]
        layer_set = LayerSet(
            number=0,
            groups=(0,),
            layers=tuple((name, 0) for name in names),
            window=AttentionWindow(),
            num_heads=num_heads,
            total_heads=num_heads * tp_size,
        )
        config = KVConfig(
            url=f"file://{store}",
            host_cache_dir=str(host_cache or bench.folder()),
            buffer_bytes=buffer_bytes,
            stored_dtype=stored_dtype,
        )
        selector = device_selector(bench.device)
        self.engine = TransferEngine(config, "the kit", on_thread_start=selector)
        caches = dict(zip(names, cache.unbind(), strict=True))
        check = LayoutCheck() if kernels is None else kernels.check(caches)
        shape = CacheShape(num_blocks, block_tokens, (layer_set,), 1, check=check)
        self.worker = KVWorker(config, shape, Rank(rank, tp_size), self.engine)
        self.worker.register(caches)
        report = self.worker.report()
        if report is not None and report.is_idle:
            self.worker.close()
            raise CacheRefused

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()

    @torch.inference_mode()
    def save(self, *pieces: Piece) -> None:
        """Order saves as vLLM does after a forward pass."""
        self.worker.save(Orders(NAMESPACE, saves=pieces))

    @torch.inference_mode()
    def save_leaving(self, *pieces: Piece) -> None:
        """Order saves as before a forward pass."""
        self.worker.save_leaving(Orders(NAMESPACE, leaving=pieces))

    @torch.inference_mode()
    def load(self, request_id: str, *pieces: Piece) -> None:
        """Order a load."""
        self.worker.load(Orders(NAMESPACE, loads=(LoadOrder(request_id, pieces),)))

    @torch.inference_mode()
    def wait_idle(self) -> None:
        """End a step without tokens, while a load is in flight."""
        self.worker.wait_idle(Orders(NAMESPACE, is_idle=True))

    @torch.inference_mode()
    def end_step(self) -> Finished:
        """Call the hooks of the end of a step; return the loads that have ended."""
        finished = self.worker.settle()
        self.worker.report()
        return finished

    def settle(self) -> Finished:
        """Step until all jobs have ended."""
        total = Finished()

        def is_idle() -> bool:
            finished = self.end_step()
            total.requests.update(finished.requests)
            total.invalid_blocks.update(finished.invalid_blocks)
            return not self.engine.in_flight

        wait_until(is_idle, "saves and loads of KV")
        return total

    def counts(self) -> Mapping[str, float]:
        """Return the counts since the last call."""
        stats = self.worker.take_stats()
        return stats.data if stats else {}


def chunks(
    block_ids: Sequence[int], size: int, block_tokens: int, *, tail: int = 0, prompt: str = ""
) -> list[Piece]:
    """Return a chunk for each `size` of these blocks; the last block has `tail` tokens.

    The same number of blocks of the same `prompt` gives the same chunks, whatever the ids.
    """
    pieces = []
    for first in range(0, len(block_ids), size):
        ids = tuple(block_ids[first : first + size])
        num_tokens = len(ids) * block_tokens
        if tail and first + size >= len(block_ids):
            num_tokens += tail - block_tokens
        key = ChunkKey(f"{prompt} {first} {len(ids)}".encode().ljust(32))
        pieces.append(Piece(key, len(ids), num_tokens, (ids,)))
    return pieces


def shuffled(sizes: Sizes, count: int, seed: int) -> list[int]:
    """Return `count` block ids in random order."""
    return random.Random(seed).sample(range(sizes.blocks), count)


class EncoderHost:
    """The worker half of an engine that shares embeddings, with its encoder cache."""

    def __init__(self, bench: Bench, store: Path, *, buffer_bytes: int = 64 * MIB) -> None:
        role = SimpleNamespace(is_ec_producer=True, is_ec_consumer=True, engine_id="kit")
        # The fields of a VllmConfig that the half reads.
        vllm_config: Any = SimpleNamespace(
            ec_transfer_config=role,
            device_config=SimpleNamespace(device=bench.device),
            parallel_config=SimpleNamespace(data_parallel_index=0),
        )
        config = EncoderConfig(
            url=f"file://{store}", host_cache_dir=str(bench.folder()), buffer_bytes=buffer_bytes
        )
        self.worker = EncoderWorker.start(vllm_config, config, Rank(0, 1))
        self.cache: dict[str, Tensor] = {}
        self._totals: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()

    @torch.inference_mode()
    def encode(self, name: str, embedding: Tensor) -> None:
        """Play the step in which `embedding` is computed and its save ordered."""
        order = ec.SaveOrder(name, _key(name), {"num_embeds": len(embedding)})
        self.worker.begin_saves(ec.Orders(saves=(order,)), self.cache)
        self.cache[name] = embedding
        self.worker.save(name, self.cache)
        self.worker.settle()

    @torch.inference_mode()
    def load(self, name: str) -> None:
        """Play the step that needs an embedding which is stored."""
        order = ec.LoadOrder(name, _key(name))
        self.worker.load(ec.Orders(loads=(order,)), self.cache)
        self.worker.settle()

    def counts(self) -> Mapping[str, float]:
        """Return the counts since the worker started."""
        report = self.worker.report()
        for totals in report.totals.values() if report else ():
            self._totals.update(totals)
        return self._totals

    def wait_for(self, event: str, count: int) -> None:
        """Step until `count` items had `event`: saved, dropped ..."""

        def is_so() -> bool:
            self.worker.settle()
            return self.counts().get(f"items/{event}", 0) >= count

        wait_until(is_so, f"{count} items {event}")


def _key(name: str) -> Key:
    return object_key(Kind.EC, NAMESPACE, name)


def drawn(num_embeds: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an embedding of random bytes."""
    drawn = torch.empty(num_embeds, width * dtype.itemsize, dtype=torch.uint8, device=device)
    return drawn.random_().view(dtype)
