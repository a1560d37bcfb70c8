# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 with pictures; Gemma 4 with pictures and videos."""

from pathlib import Path

from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
)

from lab.models.attention import gemma3_text_config
from lab.models.building import chat_template, finish, train_tokenizer, vision_config

NAMED = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
# vLLM replaces placeholders beside line feeds by the tokens that runs of these have.
LINE_FEEDS = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
CHAT_TEMPLATE = chat_template({"image": NAMED["boi_token"]})
PICTURE_SIDE = 112
PATCH_SIDE = 14
NAMED_4 = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
VIDEO_TOKEN = "<|video|>"
TOKENS_PER_PICTURE_4 = 70  # the fewest that it knows
CHAT_TEMPLATE_4 = chat_template(
    {"image": NAMED_4["image_token"], "video": VIDEO_TOKEN, "audio": NAMED_4["audio_token"]}
)
TOKENS_PER_PICTURE = 16


def make_gemma3_vl(path: str | Path, seed: int = 0) -> Path:
    """Write a Gemma 3 checkpoint, with SigLIP, of about 5 MB to `path` and return it.

    All pictures are brought to one size. The tokens of a picture attend to each other.
    """
    tokenizer = train_tokenizer([*NAMED.values(), *LINE_FEEDS], CHAT_TEMPLATE, NAMED)
    token = tokenizer.convert_tokens_to_ids
    config = Gemma3Config(
        text_config=gemma3_text_config(tokenizer),
        vision_config=vision_config(
            image_size=PICTURE_SIDE, patch_size=PATCH_SIDE, vision_use_head=False
        ),
        mm_tokens_per_image=TOKENS_PER_PICTURE,
        boi_token_index=token(NAMED["boi_token"]),
        eoi_token_index=token(NAMED["eoi_token"]),
        image_token_index=token(NAMED["image_token"]),
        tie_word_embeddings=False,
        dtype="float32",
    )
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": PICTURE_SIDE, "width": PICTURE_SIDE}),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
        image_seq_length=TOKENS_PER_PICTURE,
    )
    names = {"vision_tower.": "vision_tower.vision_model."}
    return finish(path, Gemma3ForConditionalGeneration(config), processor, seed, names)


def make_gemma4(path: str | Path, seed: int = 0) -> Path:
    """Write a Gemma 4 checkpoint of about 6 MB to `path` and return it, which like the large models
    cannot hear.

    As in the real model, heads of full attention are wider than those of sliding windows.
    """
    tokenizer = train_tokenizer([*NAMED_4.values(), VIDEO_TOKEN], CHAT_TEMPLATE_4, NAMED_4)
    token = tokenizer.convert_tokens_to_ids
    text = gemma3_text_config(tokenizer)
    del text["query_pre_attn_scalar"]
    text |= {
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = vision_config(
        num_key_value_heads=2,
        head_dim=32,
        position_embedding_size=64,
        default_output_length=TOKENS_PER_PICTURE_4,  # only vLLM reads it
    )
    config = Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        boi_token_id=token(NAMED_4["boi_token"]),
        eoi_token_id=token(NAMED_4["eoi_token"]),
        image_token_id=token(NAMED_4["image_token"]),
        video_token_id=token(VIDEO_TOKEN),
        boa_token_id=token(NAMED_4["boa_token"]),
        eoa_token_index=token(NAMED_4["eoa_token"]),
        audio_token_id=token(NAMED_4["audio_token"]),
        tie_word_embeddings=False,
        dtype="float32",
    )
    processor = Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(max_soft_tokens=TOKENS_PER_PICTURE_4),
        tokenizer=tokenizer,
        video_processor=Gemma4VideoProcessor(),
        chat_template=CHAT_TEMPLATE_4,
        image_seq_length=TOKENS_PER_PICTURE_4,
    )
    return finish(path, Gemma4ForConditionalGeneration(config), processor, seed)
