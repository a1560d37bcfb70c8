# SPDX-License-Identifier: Apache-2.0
"""Qwen's vision-language models: pictures of any size, and videos."""

from pathlib import Path
from typing import Any

from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from lab.models.building import chat_template, finish, text_config, train_tokenizer

MEDIA_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = chat_template(
    {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    }
)
MAX_TOKENS_PER_ITEM = 1024


def make_qwen25_vl(path: str | Path, seed: int = 0) -> Path:
    """Write a Qwen2.5-VL checkpoint of about 4 MB to `path` and return it."""
    tokenizer = train_tokenizer(MEDIA_TOKENS, CHAT_TEMPLATE)
    text = text_config(
        tokenizer,
        # A head of 32 has 16 rotary frequencies: 4 for time, 6 each for height and width.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [4, 6, 6],
        },
    )
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, dtype="float32", **_token_ids(tokenizer)
    )
    pixels = _pixels(28)
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**pixels),
        chat_template=CHAT_TEMPLATE,
    )
    return finish(path, Qwen2_5_VLForConditionalGeneration(config), processor, seed)


def make_qwen3_vl(path: str | Path, seed: int = 0) -> Path:
    """Write a Qwen3-VL checkpoint of about 5 MB to `path` and return it.

    An embedding concatenates the features of two layers and the last, and so is three times as wide
    as the language model.
    """
    tokenizer = train_tokenizer(MEDIA_TOKENS, CHAT_TEMPLATE)
    text = text_config(
        tokenizer,
        head_dim=32,
        # As above, with interleaved axes.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    )
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16 * 16,
        "deepstack_visual_indexes": [0, 1],
    }
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, dtype="float32", **_token_ids(tokenizer)
    )
    pixels = _pixels(32) | {"patch_size": 16}
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**pixels),
        chat_template=CHAT_TEMPLATE,
    )
    return finish(path, Qwen3VLForConditionalGeneration(config), processor, seed)


def _token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    token = tokenizer.convert_tokens_to_ids
    return {
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
    }


def _pixels(side: int) -> dict[str, Any]:
    """Return the limits of a picture, in which a token covers `side` x `side` pixels."""
    return {"min_pixels": 4 * side * side, "max_pixels": MAX_TOKENS_PER_ITEM * side * side}
