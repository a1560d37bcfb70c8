# SPDX-License-Identifier: Apache-2.0
"""LFM2-VL: SigLIP 2 for pictures of any size; short convolutions between layers of attention."""

from pathlib import Path

from transformers import (
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    Lfm2VlImageProcessor,
    Lfm2VlProcessor,
)

from lab.models.building import chat_template, finish, text_config, train_tokenizer, vision_config

NAMED = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail": "<|img_thumbnail|>",
}
TILES = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11))
CHAT_TEMPLATE = chat_template({"image": NAMED["image_token"]})
TILE_SIDE = 128
PATCH_SIDE = 16
MERGED = 2


def make_lfm2_vl(path: str | Path, seed: int = 0) -> Path:
    """Write an LFM2-VL checkpoint of about 5 MB to `path` and return it."""
    tokenizer = train_tokenizer([*NAMED.values(), *TILES], CHAT_TEMPLATE, NAMED)
    text = text_config(
        tokenizer,
        model_type="lfm2",
        conv_dim=128,
        block_dim=128,
        conv_dim_out=128,
        block_multiple_of=32,
        block_ff_dim=256,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        tie_word_embeddings=True,
    )
    config = Lfm2VlConfig(
        text_config=text,
        vision_config=vision_config(
            model_type="siglip2_vision_model",
            patch_size=PATCH_SIDE,
            num_patches=(TILE_SIDE // PATCH_SIDE) ** 2,
            vision_use_head=False,
        ),
        image_token_id=tokenizer.convert_tokens_to_ids(NAMED["image_token"]),
        projector_hidden_size=128,
        downsample_factor=MERGED,
        tie_word_embeddings=True,
        dtype="float32",
    )
    processor = Lfm2VlProcessor(
        image_processor=Lfm2VlImageProcessor(
            tile_size=TILE_SIDE,
            encoder_patch_size=PATCH_SIDE,
            min_image_tokens=4,
            max_image_tokens=16,
            max_num_patches=(TILE_SIDE // PATCH_SIDE) ** 2,
        ),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    names = {"model.vision_tower.": "model.vision_tower.vision_model."}
    return finish(path, Lfm2VlForConditionalGeneration(config), processor, seed, names)
