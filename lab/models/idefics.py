# SPDX-License-Identifier: Apache-2.0
"""Idefics3: a picture is cut into rows and columns of tiles, and shown whole as one more."""

from pathlib import Path

from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
)

from lab.models.building import chat_template, finish, text_config, train_tokenizer, vision_config

IMAGE_TOKEN = "<image>"
MEDIA_TOKENS = (
    IMAGE_TOKEN,
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
CHAT_TEMPLATE = chat_template({"image": IMAGE_TOKEN})
TILE_SIDE = 112
PATCH_SIDE = 14
MERGED = 2
TOKENS_PER_TILE = (TILE_SIDE // PATCH_SIDE // MERGED) ** 2


def make_idefics3(path: str | Path, seed: int = 0) -> Path:
    """Write an Idefics3 checkpoint of about 4 MB to `path` and return it."""
    tokenizer = train_tokenizer(MEDIA_TOKENS, CHAT_TEMPLATE)
    config = Idefics3Config(
        text_config=text_config(tokenizer, model_type="llama"),
        vision_config=vision_config(image_size=TILE_SIDE, patch_size=PATCH_SIDE),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        scale_factor=MERGED,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessor(
            size={"longest_edge": 2 * TILE_SIDE}, max_image_size={"longest_edge": TILE_SIDE}
        ),
        tokenizer=tokenizer,
        image_seq_len=TOKENS_PER_TILE,
        chat_template=CHAT_TEMPLATE,
    )
    return finish(path, Idefics3ForConditionalGeneration(config), processor, seed)
