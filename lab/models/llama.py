# SPDX-License-Identifier: Apache-2.0
"""Llama 4: tiles of a picture, experts, and layers that attend to chunks of the prompt."""

from pathlib import Path

from transformers import (
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4ImageProcessor,
    Llama4Processor,
)

from lab.models.building import chat_template, finish, text_config, train_tokenizer, vision_config

IMAGE_TOKEN = "<|image|>"
PATCH_TOKEN = "<|patch|>"
BOUNDS = ("<|image_start|>", "<|image_end|>")
MEDIA_TOKENS = (
    IMAGE_TOKEN,
    PATCH_TOKEN,
    *BOUNDS,
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
)
CHAT_TEMPLATE = chat_template({"image": IMAGE_TOKEN})
TILE_SIDE = 112
PATCH_SIDE = 14
CHUNK = 128


def make_llama4(path: str | Path, seed: int = 0) -> Path:
    """Write a Llama 4 checkpoint of about 6 MB to `path` and return it."""
    tokenizer = train_tokenizer(MEDIA_TOKENS, CHAT_TEMPLATE)
    token = tokenizer.convert_tokens_to_ids
    text = text_config(
        tokenizer,
        head_dim=32,
        intermediate_size=128,
        intermediate_size_mlp=256,
        num_local_experts=4,
        attention_chunk_size=CHUNK,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = vision_config(
        image_size=TILE_SIDE,
        patch_size=PATCH_SIDE,
        vision_output_dim=128,
        # What remains of four patches of 64, which become one token.
        projector_input_dim=128,
        projector_output_dim=128,
        intermediate_size=256,
    )
    config = Llama4Config(
        text_config=text,
        vision_config=vision,
        image_token_index=token(PATCH_TOKEN),
        boi_token_index=token(BOUNDS[0]),
        eoi_token_index=token(BOUNDS[1]),
        dtype="float32",
    )
    processor = Llama4Processor(
        image_processor=Llama4ImageProcessor(
            size={"height": TILE_SIDE, "width": TILE_SIDE}, max_patches=4
        ),
        tokenizer=tokenizer,
        patch_size=PATCH_SIDE,
        chat_template=CHAT_TEMPLATE,
    )
    return finish(path, Llama4ForConditionalGeneration(config), processor, seed)
