# SPDX-License-Identifier: Apache-2.0
"""Kimi-VL: MoonViT, which takes pictures of any size, and DeepSeek's latent attention (MLA)."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, PreTrainedConfig, PreTrainedModel

from lab.models.attention import deepseek_v2_config
from lab.models.building import chat_template, finish, train_tokenizer, vision_config
from lab.models.processing_kimi_vl import KimiVLImageProcessor, KimiVLProcessor

IMAGE_TOKEN = "<|media_pad|>"
MEDIA_TOKENS = ("<|media_start|>", "<|media_content|>", IMAGE_TOKEN, "<|media_end|>")
CHAT_TEMPLATE = chat_template({"image": "".join(MEDIA_TOKENS)})
PATCH_SIDE = 14
MERGED = 4
POSITIONS = 16


class KimiVLConfig(PreTrainedConfig):
    """What vLLM reads of a Kimi-VL checkpoint's configuration."""

    model_type = "kimi_vl"


class KimiVLForConditionalGeneration(PreTrainedModel):
    """The weights of Kimi-VL under the names that vLLM reads. Computes nothing."""

    config_class = KimiVLConfig

    def __init__(self, config: KimiVLConfig, text: DeepseekV2Config) -> None:
        super().__init__(config)
        vision = config.vision_config
        width = vision["hidden_size"]
        self.language_model = DeepseekV2ForCausalLM(text)
        self.vision_tower = _moon_vit(
            width, vision["intermediate_size"], vision["num_hidden_layers"]
        )
        self.multi_modal_projector = nn.ModuleDict(
            {
                "pre_norm": nn.LayerNorm(width),
                "linear_1": nn.Linear(MERGED * width, MERGED * width),
                "linear_2": nn.Linear(MERGED * width, text.hidden_size),
            }
        )
        self.post_init()

    def get_output_embeddings(self) -> Any:
        """Return the layer that gives the logits."""
        return self.language_model.lm_head

    def get_input_embeddings(self) -> Any:
        """Return the embeddings of tokens."""
        return self.language_model.get_input_embeddings()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: all weights are drawn later."""


def make_kimi_vl(path: str | Path, seed: int = 0) -> Path:
    """Write a Kimi-VL checkpoint of about 6 MB to `path` and return it.

    It has code of its own: engines need `--trust-remote-code`.
    """
    tokenizer = train_tokenizer(MEDIA_TOKENS, CHAT_TEMPLATE)
    text = DeepseekV2Config(
        **deepseek_v2_config(tokenizer), architectures=["DeepseekV2ForCausalLM"]
    )
    config = KimiVLConfig(
        text_config=text.to_dict(),
        vision_config=vision_config(
            model_type="moonvit",
            patch_size=PATCH_SIDE,
            init_pos_emb_height=POSITIONS,
            init_pos_emb_width=POSITIONS,
            merge_kernel_size=[2, 2],
        ),
        media_placeholder_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        pad_token_id=tokenizer.pad_token_id,
        vocab_size=len(tokenizer),
        dtype="float32",
    )
    processor = KimiVLProcessor(
        KimiVLImageProcessor(patch_size=PATCH_SIDE), tokenizer, chat_template=CHAT_TEMPLATE
    )
    return finish(path, KimiVLForConditionalGeneration(config, text), processor, seed)


def _moon_vit(width: int, mlp_width: int, num_layers: int) -> nn.Module:
    positions = nn.Module()
    positions.weight = nn.Parameter(torch.empty(POSITIONS, POSITIONS, width))
    patches = nn.ModuleDict({"proj": nn.Conv2d(3, width, PATCH_SIDE), "pos_emb": positions})
    blocks = [
        nn.ModuleDict(
            {
                "norm0": nn.LayerNorm(width),
                "norm1": nn.LayerNorm(width),
                "wqkv": nn.Linear(width, 3 * width),
                "wo": nn.Linear(width, width),
                "mlp": nn.ModuleDict(
                    {"fc0": nn.Linear(width, mlp_width), "fc1": nn.Linear(mlp_width, width)}
                ),
            }
        )
        for _ in range(num_layers)
    ]
    encoder = {"blocks": nn.ModuleList(blocks), "final_layernorm": nn.LayerNorm(width)}
    return nn.ModuleDict({"patch_embed": patches, "encoder": nn.ModuleDict(encoder)})
