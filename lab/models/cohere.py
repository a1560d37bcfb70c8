# SPDX-License-Identifier: Apache-2.0
"""Command A Vision: tiles of a picture, each with a line feed of its own after it."""

from pathlib import Path

from transformers import (
    Cohere2VisionConfig,
    Cohere2VisionForConditionalGeneration,
    Cohere2VisionImageProcessor,
    Cohere2VisionProcessor,
)

from lab.models.building import chat_template, finish, text_config, train_tokenizer, vision_config

NAMED = {
    "image_token": "<|IMG_PATCH|>",
    "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}
CHAT_TEMPLATE = chat_template({"image": NAMED["image_token"]})
TILE_SIDE = 112
PATCH_SIDE = 14
MERGED = 2
WINDOW = 80


def make_cohere2_vision(path: str | Path, seed: int = 0) -> Path:
    """Write a Command A Vision checkpoint, with SigLIP, of about 4 MB to `path` and return it.

    Three of four layers have a sliding window.
    """
    tokenizer = train_tokenizer(list(NAMED.values()), CHAT_TEMPLATE, NAMED)
    config = Cohere2VisionConfig(
        text_config=text_config(
            tokenizer, model_type="cohere2", sliding_window=WINDOW, tie_word_embeddings=True
        ),
        vision_config=vision_config(
            model_type="siglip_vision_model",
            image_size=TILE_SIDE,
            patch_size=PATCH_SIDE,
            vision_use_head=False,
        ),
        downsample_factor=MERGED,
        image_token_id=tokenizer.convert_tokens_to_ids(NAMED["image_token"]),
        alignment_intermediate_size=256,
        tie_word_embeddings=True,
        dtype="float32",
    )
    processor = Cohere2VisionProcessor(
        image_processor=Cohere2VisionImageProcessor(
            size={"height": TILE_SIDE, "width": TILE_SIDE},
            max_patches=4,
            patch_size=TILE_SIDE // PATCH_SIDE // MERGED,
        ),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    model = Cohere2VisionForConditionalGeneration(config)
    names = {"model.vision_tower.": "model.vision_tower.vision_model."}
    return finish(path, model, processor, seed, names)
