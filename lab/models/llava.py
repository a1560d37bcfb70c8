# SPDX-License-Identifier: Apache-2.0
"""LLaVA: one size for all pictures; vLLM cannot expand its placeholders without the pixels."""

from pathlib import Path

from transformers import (
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from lab.models.building import chat_template, finish, text_config, train_tokenizer

IMAGE_TOKEN = "<image>"
CHAT_TEMPLATE = chat_template({"image": IMAGE_TOKEN})
PICTURE_SIDE = 112
PATCH_SIDE = 14


def make_llava(path: str | Path, seed: int = 0) -> Path:
    """Write a LLaVA checkpoint, CLIP and Llama, of about 4 MB to `path` and return it."""
    tokenizer = train_tokenizer([IMAGE_TOKEN], CHAT_TEMPLATE)
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "projection_dim": 64,
        "image_size": PICTURE_SIDE,
        "patch_size": PATCH_SIDE,
    }
    config = LlavaConfig(
        text_config=text_config(tokenizer, model_type="llama"),
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=(PICTURE_SIDE // PATCH_SIDE) ** 2,
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
    model = LlavaForConditionalGeneration(config)
    return finish(path, model, processor, seed, {"vision_tower.": "vision_tower.vision_model."})
