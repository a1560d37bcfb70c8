# SPDX-License-Identifier: Apache-2.0
"""Stand-ins of models whose layers have KV of several shapes: vLLM's own code makes the cache
groups and allocates the tensors."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from lab.vllm_loop import Row
from tests.kvshare.test_chunks import LONG
from tests.kvshare.toy import (
    BLOCK,
    ToyEngine,
    ToyModel,
    engine_config,
    expected_answer,
    kv_of,
    make_request,
)

try:  # from 0.33 on
    from vllm.v1.core.kv_cache_planning import (
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
    )
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

W = 3 * BLOCK


def full(heads: int = 2, size: int = 8) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16
    )


def window(heads: int = 2, size: int = 8) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK,
        num_kv_heads=heads,
        head_size=size,
        dtype=torch.bfloat16,
        sliding_window=W,
    )


def mla(size: int = 24, dtype: torch.dtype = torch.bfloat16, **more: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=size, dtype=dtype, **more)


def mla_fp8() -> MLAAttentionSpec:
    """A latent vector in 8 bits, its scales, and its position in 16 bits, one after the other."""
    return mla(dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", state_content_bytes=28)


def indexer() -> MLAAttentionSpec:
    """An indexer keeps bytes, and the scales of all tokens of a block after their numbers."""
    return mla(12, torch.uint8)


def named(**kinds: tuple[int, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Return the layers of a model: of each kind so many, the kinds one after the other."""
    return {
        f"model.layers.{number}.{kind}": spec
        for kind, (count, spec) in kinds.items()
        for number in range(count)
    }


GEMMA_4 = named(window=(5, window(8, 8)), full=(1, full(2, 16)))
"""Window layers have twice the KV of the others."""
MIMO_V2 = named(window=(4, window(8, 12)), full=(2, full(4, 12)))
DRAFT = named(target=(4, full(4)), draft=(1, full(8)))
"""A draft model has another number of heads than its target."""
MLA_DRAFT = named(target=(4, mla()), draft=(1, full(2)))
SPARSE = named(index=(4, indexer()), latent=(4, mla()))
"""Sparse attention registers an indexer before the layer that it serves."""
SPARSE_FP8 = named(index=(4, indexer()), latent=(4, mla_fp8()))
WINDOWS_AND_DRAFT = named(window=(3, window()), full=(2, full()), draft=(1, full(4)))


def caches(
    model: Path, layers: Mapping[str, KVCacheSpec], layout: str, num_blocks: int = 160
) -> KVCacheConfig:
    """Return what vLLM makes of `layers` in `layout`."""
    config = engine_config(model)
    config.cache_config.kv_cache_layout = layout
    config.cache_config.num_gpu_blocks_override = num_blocks
    groups = get_kv_cache_groups(config, dict(layers))
    cache: KVCacheConfig = get_kv_cache_config_from_groups(config, groups, 1 << 30)
    cache.kv_cache_layout = layout
    return cache


class ShapedModel(ToyModel):
    """A toy model with tensors as vLLM allocates them; each layer has its own numbers."""

    def allocate(self, cache: KVCacheConfig) -> None:
        """Make the tensors of all layers, full of garbage."""
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        layout = KVCacheLayout[str(cache.kv_cache_layout)]
        self.kv_caches = allocate_kv_cache(cache, torch.device("cpu"), layout)
        for each in self.kv_caches.values():
            each.view(torch.uint8).fill_(0xAB)  # garbage, so that an unwritten block is noticed
        self._names = [group.layer_names for group in cache.kv_cache_groups]

    def read(self, row: Row, group: int, position: int) -> float:
        """Return the KV of one token; each layer of the group has its own form of it."""
        forms = [
            [float(part) - _layer(number) for cells in parts for part in cells.unique()]
            for number, parts in enumerate(self._tokens(row, group, position))
        ]
        (kv,) = {value for form in forms for value in form}
        return kv

    def fill(self, row: Row, position: int, tokens: Sequence[int]) -> None:
        for group in range(len(self._names)):
            for number, parts in enumerate(self._tokens(row, group, position)):
                for cells in parts:
                    cells.fill_(kv_of(tokens, group) + _layer(number))

    def _tokens(self, row: Row, group: int, position: int) -> list[list[Tensor]]:
        """View what each layer of a group keeps of one token, as numbers."""
        block, token = row.block_ids[group][position // BLOCK], position % BLOCK
        return [_parts(self.kv_caches[name][block], token) for name in self._names[group]]


def _parts(block: Tensor, token: int) -> list[Tensor]:
    """View one token in `block` [head, token, content] of a layer."""
    if block.dtype != torch.uint8:
        return [block[:, token].view(torch.float32)]
    # As `indexer_k_quant_and_cache` writes a block, and the kernels of some dtypes with scales.
    in_memory_order = block if block.is_contiguous() else block.transpose(0, 1)
    numbers = in_memory_order.view(torch.float32).view(-1)
    width = len(numbers) // BLOCK - 1
    scales = numbers[BLOCK * width :]
    return [numbers[token * width : (token + 1) * width], scales[token : token + 1]]


def _layer(number: int) -> float:
    """Return what is added to the numbers of a layer of a group."""
    return 1_000_000.0 * number


def check_conversation(*engines: ToyEngine) -> None:
    """Check that a conversation gets the right tokens if engines take turns, and that each of them
    loads. Other requests run beside it, and blocks are used again."""
    talk = LONG[:9]
    for turn in range(4):
        here = engines[turn % len(engines)]
        assert here.scheduler.reset_prefix_cache()
        prompts = [[*talk, turn], [7, turn, *LONG[:6]]]
        requests = [
            make_request(f"{turn}-{number}", prompt, 6) for number, prompt in enumerate(prompts)
        ]
        for prompt, answer in zip(prompts, here.run(*requests), strict=True):
            assert answer.tokens == expected_answer(prompt, 6, here.windows)
        talk = [*prompts[0], *here.answers[f"{turn}-0"].tokens]
    assert all(each.counts["blocks/loaded"] for each in engines)
