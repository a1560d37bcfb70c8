# SPDX-License-Identifier: Apache-2.0
"""Qwen's vision-language models: pictures of any size, and videos."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import (
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from lab.models.building import chat_template, finish, text_config, train_tokenizer
from lab.models.hybrid import DELTA_NET

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
# A head of 32 has 16 rotary frequencies: 4 for time, 6 each for height and width.
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
INTERLEAVED_ROPE = ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}


def make_qwen2_vl(path: str | Path, seed: int = 0) -> Path:
    """Write a Qwen2-VL checkpoint of about 4 MB to `path` and return it."""
    tokenizer = train_tokenizer(MEDIA_TOKENS, CHAT_TEMPLATE)
    text = text_config(tokenizer, rope_parameters=ROPE)
    vision = {"depth": 2, "embed_dim": 64, "num_heads": 2, "hidden_size": text["hidden_size"]}
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, dtype="float32", **_token_ids(tokenizer)
    )
    processor = _processor(Qwen2VLProcessor, Qwen2VLVideoProcessor, tokenizer, pixels(28))
    return finish(path, Qwen2VLForConditionalGeneration(config), processor, seed)


def make_qwen25_vl(path: str | Path, seed: int = 0) -> Path:
    """Write a Qwen2.5-VL checkpoint of about 4 MB to `path` and return it."""
    tokenizer = train_tokenizer(MEDIA_TOKENS, CHAT_TEMPLATE)
    text = text_config(tokenizer, rope_parameters=ROPE)
    vision = vision_tower(text, fullatt_block_indexes=[1])
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, dtype="float32", **_token_ids(tokenizer)
    )
    processor = _processor(Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, tokenizer, pixels(28))
    return finish(path, Qwen2_5_VLForConditionalGeneration(config), processor, seed)


def make_qwen3_vl(path: str | Path, seed: int = 0) -> Path:
    """Write a Qwen3-VL checkpoint of about 5 MB to `path` and return it.

    An embedding concatenates the features of two layers and the last, and so is three times as wide
    as the language model.
    """
    tokenizer = train_tokenizer(MEDIA_TOKENS, CHAT_TEMPLATE)
    text = text_config(tokenizer, head_dim=32, rope_parameters=INTERLEAVED_ROPE)
    vision = vision_tower(
        text, depth=3, num_position_embeddings=16 * 16, deepstack_visual_indexes=[0, 1]
    )
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, dtype="float32", **_token_ids(tokenizer)
    )
    processor = _processor(
        Qwen3VLProcessor, Qwen3VLVideoProcessor, tokenizer, pixels(32) | {"patch_size": 16}
    )
    return finish(path, Qwen3VLForConditionalGeneration(config), processor, seed)


def make_qwen35_vl(path: str | Path, seed: int = 0) -> Path:
    """Write a Qwen3.5 checkpoint of about 8 MB to `path` and return it.

    Three of four layers are recurrent (Gated DeltaNet), for which a CPU needs bfloat16.
    """
    tokenizer = train_tokenizer(MEDIA_TOKENS, CHAT_TEMPLATE)
    text = text_config(
        tokenizer,
        head_dim=64,
        # A quarter of a head of 64 is rotated: 8 frequencies.
        rope_parameters=INTERLEAVED_ROPE
        | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.25},
        **DELTA_NET,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    vision = vision_tower(text, num_position_embeddings=16 * 16)
    config = Qwen3_5Config(
        text_config=text, vision_config=vision, dtype="bfloat16", **_token_ids(tokenizer)
    )
    processor = _processor(
        Qwen3VLProcessor, Qwen3VLVideoProcessor, tokenizer, pixels(32) | {"patch_size": 16}
    )
    model = Qwen3_5ForConditionalGeneration(config).bfloat16()
    return finish(path, model, processor, seed)


def vision_tower(text: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the config of the part that encodes pictures for the language model `text`."""
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        **more,
    }


def _processor(
    kind: Callable[..., ProcessorMixin],
    video: Callable[..., Any],
    tokenizer: PreTrainedTokenizerFast,
    shown: dict[str, Any],
) -> ProcessorMixin:
    """Return a processor whose pictures and videos have the limits `shown`."""
    return kind(
        image_processor=Qwen2VLImageProcessor(**shown),
        tokenizer=tokenizer,
        video_processor=video(**shown),
        chat_template=CHAT_TEMPLATE,
    )


def _token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    token = tokenizer.convert_tokens_to_ids
    return {
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
    }


def pixels(side: int) -> dict[str, Any]:
    """Return the limits of a picture, in which a token covers `side` x `side` pixels."""
    return {"min_pixels": 4 * side * side, "max_pixels": MAX_TOKENS_PER_ITEM * side * side}
