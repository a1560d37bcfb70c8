# SPDX-License-Identifier: Apache-2.0
"""The states of recurrent layers (Mamba, gated delta nets, short convolutions), as vLLM keeps them.

A recurrent layer keeps one state, which depends on all tokens so far. In vLLM's mode `align` a
cache block of such a layer is the state at the end of the block's tokens. vLLM keeps few of these
states, and moves them between blocks. So a state's block is never found by its position in the
block table: vLLM hands over the blocks that hold a state, in the step that computes it
(`KVConnectorBlockState.boundary_state_offloads`).
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from vllm.v1.kv_cache_interface import MambaSpec

from ecshare.plugin.compat import option
from kvshare.compat import hands_over_states

_ALIGN = "align"
# The state of a model is 10 to 200 MB. It is stored as several objects, at most this large if
# possible, so that they are stored and fetched side by side.
_OBJECT_BYTES = 32 << 20

T = TypeVar("T")


def state_refusal(spec: MambaSpec, block_tokens: int) -> str | None:
    """Return why states of layers with `spec` cannot be shared; None if they can."""
    if spec.mamba_cache_mode != _ALIGN:
        return (
            f"mamba_cache_mode is {spec.mamba_cache_mode!r}: states of recurrent layers are shared "
            f"in mode {_ALIGN!r}, which vLLM takes with --enable-prefix-caching"
        )
    if not hands_over_states():
        return "this release of vLLM does not hand over states of recurrent layers: use 0.32"
    if spec.num_speculative_blocks:
        return (
            "speculative decoding with recurrent layers is not supported: leave "
            "--speculative-config out"
        )
    if spec.block_size != block_tokens:
        return (
            f"recurrent layers have blocks of {spec.block_size} tokens and others of "
            f"{block_tokens}: leave --mamba-block-size out"
        )
    return None


def state_facts(spec: MambaSpec) -> str:
    """Return all that decides how the bytes of a state are read, except the kernel."""
    kind = option(spec.mamba_type, "name") or str(spec.mamba_type)
    parts = (
        f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    return f"state {kind}: {', '.join(parts)}"


def objects_of(layers: Sequence[T], layer_bytes: int) -> Iterator[Sequence[T]]:
    """Divide layers, each with a state of `layer_bytes`, into those of each object."""
    count = max(1, _OBJECT_BYTES // layer_bytes)
    for first in range(0, len(layers), count):
        yield layers[first : first + count]
