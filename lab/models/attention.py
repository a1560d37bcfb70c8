# SPDX-License-Identifier: Apache-2.0
"""Text models whose KV is not the same for each token, head and layer."""

from pathlib import Path
from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedTokenizerFast,
)

from lab.models.building import finish, text_config, text_tokenizer

WINDOW = 80
# vLLM's CPU kernel for latent attention is compiled for these: together 576 elements a token.
LATENT, ROTARY = 512, 64


def make_gemma3(path: str | Path, seed: int = 0) -> Path:
    """Write a Gemma 3 checkpoint of about 4 MB to `path` and return it.

    Two of three layers attend to the last `WINDOW` tokens only; vLLM keeps KV in three groups.
    """
    tokenizer = text_tokenizer()
    config = Gemma3TextConfig(**gemma3_text_config(tokenizer), dtype="float32")
    return finish(path, Gemma3ForCausalLM(config), tokenizer, seed)


def gemma3_text_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the config of Gemma 3's language model."""
    return text_config(
        tokenizer,
        num_hidden_layers=6,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=False,
    )


def make_deepseek_v2(path: str | Path, seed: int = 0) -> Path:
    """Write a DeepSeek-V2 checkpoint of about 5 MB to `path` and return it.

    Its attention is latent (MLA): KV is one vector for each token, the same on every rank.
    """
    tokenizer = text_tokenizer()
    config = DeepseekV2Config(**deepseek_v2_config(tokenizer), dtype="float32")
    return finish(path, DeepseekV2ForCausalLM(config), tokenizer, seed)


def deepseek_v2_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the config of DeepSeek-V2's language model."""
    return text_config(
        tokenizer,
        num_key_value_heads=4,
        kv_lora_rank=LATENT,
        q_lora_rank=None,
        qk_rope_head_dim=ROTARY,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        # vLLM requires both; the configuration has neither by default.
        n_group=1,
        topk_group=1,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
    )
