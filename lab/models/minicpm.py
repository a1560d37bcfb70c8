# SPDX-License-Identifier: Apache-2.0
"""MiniCPM-V 4.5: a resampler gives all pictures, and the frames of videos, equally many tokens."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

from lab.models.building import (
    END_OF_TEXT,
    chat_template,
    finish,
    text_config,
    train_tokenizer,
    vision_config,
)
from lab.models.processing_minicpmv import (
    MiniCPMVConfig,
    MiniCPMVImageProcessor,
    MiniCPMVProcessor,
)

MEDIA_TOKENS = ("<im_start>", "<im_end>", "<image_id>", "</image_id>", "<unk>")
# vLLM looks for these texts.
CHAT_TEMPLATE = chat_template({"image": "(<image>./</image>)", "video": "(<video>./</video>)"})
PICTURE_SIDE = 112
PATCH_SIDE = 14
TOKENS_PER_PICTURE = 16


class MiniCPMV(PreTrainedModel):
    """The weights of MiniCPM-V under the names that vLLM reads. Computes nothing."""

    config_class = MiniCPMVConfig

    def __init__(self, config: MiniCPMVConfig, vision: Idefics2VisionConfig) -> None:
        super().__init__(config)
        self.llm = Qwen3ForCausalLM(Qwen3Config(**config.to_dict()))
        self.vpm = Idefics2VisionTransformer(vision)
        self.resampler = _Resampler(config.hidden_size, vision.hidden_size)
        self.post_init()

    def get_output_embeddings(self) -> Any:
        """Return the layer that gives the logits."""
        return self.llm.lm_head

    def get_input_embeddings(self) -> Any:
        """Return the embeddings of tokens."""
        return self.llm.get_input_embeddings()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: all weights are drawn later."""


class _Resampler(nn.Module):
    def __init__(self, width: int, vision_width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(TOKENS_PER_PICTURE, width))
        self.kv_proj = nn.Linear(vision_width, width, bias=False)
        self.attn = nn.MultiheadAttention(width, 1)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width) for _ in range(3))
        self.proj = nn.Parameter(torch.empty(width, width))


def make_minicpmv(path: str | Path, seed: int = 0) -> Path:
    """Write a MiniCPM-V 4.5 checkpoint of about 4 MB to `path` and return it.

    It has code of its own: engines need `--trust-remote-code`.
    """
    tokenizer = train_tokenizer(MEDIA_TOKENS, CHAT_TEMPLATE)
    tokenizer.bos_token = END_OF_TEXT  # vLLM's processor begins each text with it
    vision = vision_config(image_size=PICTURE_SIDE, patch_size=PATCH_SIDE)
    config = MiniCPMVConfig(
        **text_config(tokenizer, head_dim=32, tie_word_embeddings=False),
        version=4.5,
        query_num=TOKENS_PER_PICTURE,
        image_size=PICTURE_SIDE,
        max_slice_num=1,
        drop_vision_last_layer=False,
        vision_config=vision,
        dtype="float32",
    )
    processor = MiniCPMVProcessor(
        MiniCPMVImageProcessor(
            patch_size=PATCH_SIDE,
            scale_resolution=PICTURE_SIDE,
            image_feature_size=TOKENS_PER_PICTURE,
        ),
        tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    return finish(path, MiniCPMV(config, Idefics2VisionConfig(**vision)), processor, seed)
