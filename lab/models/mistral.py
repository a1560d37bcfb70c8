# SPDX-License-Identifier: Apache-2.0
"""Mistral 3 with Pixtral: pictures of any size, with a token after each row of patches."""

from pathlib import Path

from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
)

from lab.models.building import chat_template, finish, text_config, train_tokenizer, vision_config

IMAGE_TOKEN = "[IMG]"
MEDIA_TOKENS = (IMAGE_TOKEN, "[IMG_BREAK]", "[IMG_END]")
CHAT_TEMPLATE = chat_template({"image": IMAGE_TOKEN})
PATCH_SIDE = 14
MERGED = 2


def make_mistral3(path: str | Path, seed: int = 0) -> Path:
    """Write a Mistral 3 checkpoint of about 4 MB to `path` and return it."""
    tokenizer = train_tokenizer(MEDIA_TOKENS, CHAT_TEMPLATE)
    longest = 16 * PATCH_SIDE * MERGED
    config = Mistral3Config(
        text_config=text_config(tokenizer, model_type="mistral", head_dim=32, sliding_window=None),
        vision_config=vision_config(
            model_type="pixtral", image_size=longest, patch_size=PATCH_SIDE, head_dim=32
        ),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        spatial_merge_size=MERGED,
        tie_word_embeddings=False,
        dtype="float32",
    )
    processor = PixtralProcessor(
        image_processor=PixtralImageProcessor(
            size={"longest_edge": longest}, patch_size={"height": PATCH_SIDE, "width": PATCH_SIDE}
        ),
        tokenizer=tokenizer,
        patch_size=PATCH_SIDE,
        spatial_merge_size=MERGED,
        chat_template=CHAT_TEMPLATE,
    )
    return finish(path, Mistral3ForConditionalGeneration(config), processor, seed)
