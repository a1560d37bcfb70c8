# SPDX-License-Identifier: Apache-2.0
"""LLaVA and its heirs; vLLM cannot expand their placeholders without the pixels."""

from pathlib import Path
from typing import Any

from transformers import (
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
)

from lab.models.building import chat_template, finish, text_config, train_tokenizer, vision_config

IMAGE_TOKEN = "<image>"
CHAT_TEMPLATE = chat_template({"image": IMAGE_TOKEN})
PICTURE_SIDE = 112
PATCH_SIDE = 14
TOKENS_PER_PICTURE = (PICTURE_SIDE // PATCH_SIDE) ** 2
# Those that cut pictures have small tiles, so that there are not many more tokens than words.
TILE_SIDE = 56
TOKENS_PER_TILE = (TILE_SIDE // PATCH_SIDE) ** 2
PINPOINTS = [[TILE_SIDE, 2 * TILE_SIDE], [2 * TILE_SIDE, TILE_SIDE], [2 * TILE_SIDE] * 2]
VIDEO_TOKEN = "<video>"
PUBLISHED_NAMES = {"vision_tower.": "vision_tower.vision_model."}


def make_llava(path: str | Path, seed: int = 0) -> Path:
    """Write a LLaVA checkpoint, CLIP and Llama, of about 4 MB to `path` and return it.

    All pictures are brought to one size.
    """
    tokenizer = train_tokenizer([IMAGE_TOKEN], CHAT_TEMPLATE)
    config = LlavaConfig(
        text_config=text_config(tokenizer, model_type="llama"),
        vision_config=_clip(PICTURE_SIDE),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=TOKENS_PER_PICTURE,
        dtype="float32",
    )
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": PICTURE_SIDE},
            crop_size={"height": PICTURE_SIDE, "width": PICTURE_SIDE},
        ),
        tokenizer=tokenizer,
        patch_size=PATCH_SIDE,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
        num_additional_image_tokens=1,  # CLIP's class token, which "default" leaves out again
    )
    return finish(path, LlavaForConditionalGeneration(config), processor, seed, PUBLISHED_NAMES)


def make_llava_next(path: str | Path, seed: int = 0) -> Path:
    """Write a LLaVA-NeXT checkpoint of about 4 MB to `path` and return it.

    A picture is cut into tiles, and shown whole as one more.
    """
    tokenizer = train_tokenizer([IMAGE_TOKEN], CHAT_TEMPLATE)
    config = LlavaNextConfig(
        text_config=text_config(tokenizer, model_type="llama"),
        vision_config=_clip(TILE_SIDE),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_grid_pinpoints=PINPOINTS,
        image_seq_length=TOKENS_PER_TILE,
        dtype="float32",
    )
    processor = LlavaNextProcessor(
        image_processor=LlavaNextImageProcessor(
            size={"shortest_edge": TILE_SIDE},
            crop_size={"height": TILE_SIDE, "width": TILE_SIDE},
            image_grid_pinpoints=PINPOINTS,
        ),
        tokenizer=tokenizer,
        patch_size=PATCH_SIDE,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
        num_additional_image_tokens=1,
    )
    return finish(path, LlavaNextForConditionalGeneration(config), processor, seed, PUBLISHED_NAMES)


def make_llava_onevision(path: str | Path, seed: int = 0) -> Path:
    """Write a LLaVA-OneVision checkpoint, SigLIP and Qwen2, of about 4 MB to `path` and return it.

    Tiles as in LLaVA-NeXT; videos, whose frames are pooled.
    """
    template = chat_template({"image": IMAGE_TOKEN, "video": VIDEO_TOKEN})
    tokenizer = train_tokenizer([IMAGE_TOKEN, VIDEO_TOKEN], template)
    config = LlavaOnevisionConfig(
        text_config=text_config(tokenizer, model_type="qwen2"),
        vision_config=vision_config(
            model_type="siglip_vision_model",
            image_size=TILE_SIDE,
            patch_size=PATCH_SIDE,
            vision_use_head=False,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        video_token_index=tokenizer.convert_tokens_to_ids(VIDEO_TOKEN),
        image_grid_pinpoints=PINPOINTS,
        dtype="float32",
    )
    size = {"height": TILE_SIDE, "width": TILE_SIDE}
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=PINPOINTS),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=TOKENS_PER_TILE,
        vision_feature_select_strategy="full",
        chat_template=template,
    )
    model = LlavaOnevisionForConditionalGeneration(config)
    return finish(path, model, processor, seed, PUBLISHED_NAMES)


def _clip(side: int) -> dict[str, Any]:
    return vision_config(
        model_type="clip_vision_model",
        num_hidden_layers=3,
        projection_dim=64,
        image_size=side,
        patch_size=PATCH_SIDE,
    )
