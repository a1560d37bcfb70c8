# SPDX-License-Identifier: Apache-2.0
"""The KV caches of published models, by vLLM's own code: tensors, cache groups, bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
)

from kvshare.chunks.states import objects_of

DTYPE = torch.bfloat16
# vLLM's attention kernels for GPUs take blocks of a multiple of this.
_KERNEL_TOKENS = 16


@dataclass(frozen=True)
class KVShape:
    """The cache of a model on one rank: a group of attention layers, and for a hybrid model groups
    of recurrent layers that share their memory."""

    name: str
    layers: int
    """Layers with attention, as many as in each group of recurrent layers."""
    heads: int
    head_size: int
    block_tokens: int
    state: MambaSpec | None = None
    """The state of a recurrent layer."""
    num_recurrent_groups: int = 0

    @property
    def attention(self) -> FullAttentionSpec:
        """The spec of a layer with attention."""
        return FullAttentionSpec(
            block_size=self.block_tokens,
            num_kv_heads=self.heads,
            head_size=self.head_size,
            dtype=DTYPE,
        )

    @property
    def block_bytes(self) -> int:
        """The bytes of one block of the attention layers."""
        return self.layers * self.attention.page_size_bytes

    @property
    def token_bytes(self) -> int:
        """The bytes of the KV of one token."""
        return self.block_bytes // self.block_tokens

    @property
    def layer_state_bytes(self) -> int:
        """The bytes of the state of one recurrent layer."""
        return self.state.state_content_size_bytes if self.state is not None else 0

    @property
    def state_bytes(self) -> int:
        """The bytes of the state of all recurrent layers."""
        return self.layers * self.num_recurrent_groups * self.layer_state_bytes

    def config(self, num_blocks: int) -> KVCacheConfig:
        """Return vLLM's description of a cache of so many blocks."""
        page = self.attention.page_size_bytes
        specs = self._specs()
        tensors = [
            KVCacheTensor(
                size=page * num_blocks * self.layers,
                layers=names,
                layer_stride=page * num_blocks,
                block_stride=page,
            )
            for names, _ in specs
        ]
        groups = [KVCacheGroupSpec(names, spec) for names, spec in specs]
        return KVCacheConfig(num_blocks, tensors, groups)

    def empty_caches(self, num_blocks: int) -> Tensor:
        """Return the cache of all layers, one after the other: [layer, block, head, token, K + V].

        A block holds the state of a recurrent layer in its first bytes, if vLLM gives it to one.
        """
        shape = (self.layers, num_blocks, self.heads, self.block_tokens, 2 * self.head_size)
        return torch.zeros(shape, dtype=DTYPE)

    def by_layer(self, caches: Tensor) -> dict[str, Tensor]:
        """Return the tensor of each layer, as vLLM registers it with connectors."""
        found: dict[str, Tensor] = {}
        for names, spec in self._specs():
            for name, layer in zip(names, caches.unbind(), strict=True):
                found[name] = layer if spec is not self.state else self._states_in(layer)
        return found

    def tables(self, block_ids: Sequence[int]) -> tuple[list[int], ...]:
        """Return the block table of each cache group for a prompt in these blocks: those of its KV,
        and then one for the state of each group of recurrent layers."""
        num_kv = len(block_ids) - self.num_recurrent_groups
        kv, states = list(block_ids[:num_kv]), block_ids[num_kv:]
        return (kv, *([0] * (num_kv - 1) + [block] for block in states))

    def num_saved(self, block_ids: Sequence[int]) -> int:
        """Return how many blocks KVShareConnector counts as saved of a prompt in these blocks: one
        for each object of its state, which holds the layers that fit into 32 MiB."""
        num_kv = len(block_ids) - self.num_recurrent_groups
        if self.state is None:
            return num_kv
        num_layers = self.layers * self.num_recurrent_groups
        return num_kv + len(list(objects_of(range(num_layers), self.layer_state_bytes)))

    def has_equal(self, one: Tensor, other: Tensor, block_ids: Sequence[int]) -> bool:
        """Return whether both caches hold the same KV and states in these blocks of a prompt."""
        num_kv = len(block_ids) - self.num_recurrent_groups
        return all(
            torch.equal(*(self._bytes_of(each, block, is_state=place >= num_kv) for each in both))
            for both in [(one, other)]
            for place, block in enumerate(block_ids)
        )

    def _bytes_of(self, caches: Tensor, block: int, *, is_state: bool) -> Tensor:
        rows = caches[:, block].flatten(start_dim=1).view(torch.uint8)
        return rows[:, : self.layer_state_bytes] if is_state else rows

    def _states_in(self, layer: Tensor) -> Tensor:
        pages = layer.flatten(start_dim=1).view(torch.int8)
        return pages[:, None, None, : self.layer_state_bytes]

    def _specs(self) -> list[tuple[list[str], KVCacheSpec]]:
        specs: list[KVCacheSpec] = [self.attention]
        if self.state is not None:
            specs += [self.state] * self.num_recurrent_groups
        return [(self._names(group, len(specs)), spec) for group, spec in enumerate(specs)]

    def _names(self, group: int, num_groups: int) -> list[str]:
        """Return the names of a group's layers: the attention layer is the last of each period."""
        kind = "linear_attn" if group else "self_attn.attn"
        first = group - 1 if group else num_groups - 1
        numbers = range(first, self.layers * num_groups, num_groups)
        return [f"model.layers.{number}.{kind}" for number in numbers]


def _gated_delta_net(
    name: str, layers: int, heads: int, num_value_heads: int, dtype: torch.dtype
) -> KVShape:
    """Return the shape of a model with three GDN layers before each of `layers` with attention.

    All sizes that are not parameters are those of Qwen3-Next and Qwen3.5. `dtype`: of the matrices
    that such a layer keeps.
    """
    head_size = 256
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        1, 16, num_value_heads, 128, 128, conv_kernel_size=4
    )
    state_bytes = MambaSpec(block_size=1, shapes=shapes, dtypes=(DTYPE, dtype)).page_size_bytes
    token = FullAttentionSpec(block_size=1, num_kv_heads=heads, head_size=head_size, dtype=DTYPE)
    # As vLLM's platforms choose it: the smallest block that is not less than a state.
    kernel_bytes = _KERNEL_TOKENS * token.page_size_bytes
    block_tokens = -(-state_bytes // kernel_bytes) * _KERNEL_TOKENS
    state = MambaSpec(
        block_size=block_tokens,
        shapes=shapes,
        dtypes=(DTYPE, dtype),
        page_size_padded=block_tokens * token.page_size_bytes,
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode="align",
    )
    return KVShape(name, layers, heads, head_size, block_tokens, state, num_recurrent_groups=3)


# An 8B-class model, in vLLM's default blocks for GPUs, and hybrids as their makers configured them.
DENSE = KVShape("full attention, 8B", 32, 8, 128, 16)
HYBRID = _gated_delta_net("hybrid, Qwen3.5 9B", 8, 4, 32, torch.float32)
LARGE_HYBRID = _gated_delta_net("hybrid, Qwen3-Next 80B", 12, 2, 32, torch.bfloat16)
