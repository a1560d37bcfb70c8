# SPDX-License-Identifier: Apache-2.0
"""InternVL 3: a picture is cut into tiles, and shown whole as one more."""

from pathlib import Path

from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
)

from lab.models.building import chat_template, finish, text_config, train_tokenizer, vision_config

NAMED = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
CHAT_TEMPLATE = chat_template({"image": NAMED["context_image_token"], "video": "<video>"})
TILE_SIDE = 112
PATCH_SIDE = 14
TOKENS_PER_TILE = (TILE_SIDE // PATCH_SIDE // 2) ** 2


def make_internvl(path: str | Path, seed: int = 0) -> Path:
    """Write an InternVL checkpoint of about 4 MB to `path` and return it."""
    tokenizer = train_tokenizer(list(NAMED.values()), CHAT_TEMPLATE, NAMED)
    config = InternVLConfig(
        text_config=text_config(tokenizer, model_type="qwen2"),
        vision_config=vision_config(image_size=TILE_SIDE, patch_size=PATCH_SIDE),
        image_token_id=tokenizer.convert_tokens_to_ids(NAMED["context_image_token"]),
        image_seq_length=TOKENS_PER_TILE,
        tie_word_embeddings=False,
        dtype="float32",
    )
    size = {"height": TILE_SIDE, "width": TILE_SIDE}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=4),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size),
        image_seq_length=TOKENS_PER_TILE,
        chat_template=CHAT_TEMPLATE,
    )
    return finish(path, InternVLForConditionalGeneration(config), processor, seed)
