# SPDX-License-Identifier: Apache-2.0
"""Decides for KV dtypes of vLLM that have scales of their own whether blocks hold the scales.

The kernels of these dtypes compute a scale for each token and head, or for a few numbers. vLLM's
attention backends pack the scales into the blocks, beside or behind the numbers
(`AttentionSpec.state_content_bytes`), so that a block is complete. But their position depends on
the kernel: blocks of one shape differ between devices, and even with the installed packages. So
such blocks are opaque bytes.
"""

from typing import get_args

from vllm.config.cache import CacheDType
from vllm.v1.kv_cache_interface import AttentionSpec, get_kv_quant_mode

# Names of vLLM's `KVQuantMode`, because older releases lack some. These have no scales, or have
# them in the checkpoint.
_WITHOUT_SCALES = ("NONE", "FP8_PER_TENSOR")
# Those whose scales the backends of vLLM 0.30 to 0.33 pack into the blocks.
_IN_BLOCKS = (
    "INT8_PER_TOKEN_HEAD",
    "FP8_PER_TOKEN_HEAD",
    "INT4_PER_TOKEN_HEAD",
    "NVFP4",
    "NVFP4_DS_MLA",
    "TURBOQUANT_K8V4",
    "TURBOQUANT_4BIT_NC",
    "TURBOQUANT_K3V4_NC",
    "TURBOQUANT_3BIT_NC",
    "ULTRAQUANT_4BIT",
    "OCTAVE_K3V4",
    "OCTAVE_K3V3",
    "OCTAVE_K3V3_COMPACT",
)
_REMEDY = "set --kv-cache-dtype to another one, such as auto or fp8"


def keeps_scales(cache_dtype: str) -> bool:
    """Return whether the blocks of an engine with this `--kv-cache-dtype` hold scales."""
    return get_kv_quant_mode(str(cache_dtype)).name not in _WITHOUT_SCALES


def scales_refusal(spec: AttentionSpec, cache_dtype: str) -> str | None:
    """Return why blocks of layers with `spec` may lack scales that a reader needs; None if they
    have all. `cache_dtype`: that of the engine."""
    if cache_dtype not in get_args(CacheDType):
        # Its mode has no meaning: 0.33 gives CUSTOM the number of another mode.
        return (
            f"the KV cache dtype {cache_dtype} is a plugin's, and where it keeps its scales is "
            f"unknown: {_REMEDY}"
        )
    mode = spec.kv_quant_mode.name
    if mode in _WITHOUT_SCALES:
        return None
    if mode not in _IN_BLOCKS or spec.state_content_bytes is None:
        return f"where a KV cache of quantization {mode} keeps its scales is unknown: {_REMEDY}"
    if mode != get_kv_quant_mode(cache_dtype).name:
        # The scheduler process does not know the dtypes of all layers.
        return (
            f"some layers have a KV cache of quantization {mode} and --kv-cache-dtype is "
            f"{cache_dtype}: leave kv_cache_dtype out of --speculative-config"
        )
    return None
