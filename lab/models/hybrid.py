# SPDX-License-Identifier: Apache-2.0
"""Text models with recurrent layers beside attention: LFM2 and Qwen3.5."""

from pathlib import Path

from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from lab.models.building import finish, text_config, text_tokenizer

# Sizes of gated delta nets. vLLM's kernel for CPUs takes heads of 128 elements, in bfloat16 only.
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def make_lfm2(path: str | Path, seed: int = 0) -> Path:
    """Write an LFM2 checkpoint (short convolutions) to `path` and return it.

    vLLM runs it in float32 on a CPU.
    """
    tokenizer = text_tokenizer()
    sizes = text_config(tokenizer)
    config = Lfm2Config(
        **sizes,
        # vLLM reads these sizes of the convolution, which transformers derives.
        conv_dim=sizes["hidden_size"],
        conv_dim_out=sizes["hidden_size"],
        block_dim=sizes["hidden_size"],
        block_ff_dim=sizes["intermediate_size"],
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
        layer_types=["conv", "full_attention"] * 2,
        dtype="float32",
    )
    return finish(path, Lfm2ForCausalLM(config), tokenizer, seed)


def make_qwen3_5(path: str | Path, seed: int = 0) -> Path:
    """Write a Qwen3.5 text checkpoint (gated delta nets) to `path` and return it.

    vLLM runs it in bfloat16 on a CPU.
    """
    tokenizer = text_tokenizer()
    config = Qwen3_5TextConfig(
        **text_config(tokenizer),
        head_dim=64,
        **DELTA_NET,
        tie_word_embeddings=False,
        layer_types=["linear_attention", "full_attention"] * 2,
        dtype="float32",
    )
    return finish(path, Qwen3_5ForCausalLM(config), tokenizer, seed)
