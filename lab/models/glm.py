# SPDX-License-Identifier: Apache-2.0
"""GLM-4.1V: pictures of any size; a video's frames are pictures with a time each."""

from pathlib import Path

from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
)

from lab.models.building import chat_template, finish, text_config, train_tokenizer

MEDIA_TOKENS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
CHAT_TEMPLATE = chat_template(
    {
        "image": "<|begin_of_image|><|image|><|end_of_image|>",
        "video": "<|begin_of_video|><|video|><|end_of_video|>",
    }
)
TOKEN_SIDE = 28
PIXELS = {"shortest_edge": 4 * TOKEN_SIDE**2, "longest_edge": 512 * TOKEN_SIDE**2}


def make_glm4v(path: str | Path, seed: int = 0) -> Path:
    """Write a GLM-4.1V checkpoint of about 5 MB to `path` and return it."""
    tokenizer = train_tokenizer(list(MEDIA_TOKENS.values()), CHAT_TEMPLATE)
    text = text_config(
        tokenizer,
        # Half of a head of 32 is rotated: 8 frequencies, for time, height and width.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 3, 3],
        },
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "image_size": 112,
        "patch_size": TOKEN_SIDE // 2,
    }
    config = Glm4vConfig(
        text_config=text,
        vision_config=vision,
        dtype="float32",
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in MEDIA_TOKENS.items()},
    )
    processor = Glm4vProcessor(
        image_processor=Glm4vImageProcessor(size=PIXELS),
        tokenizer=tokenizer,
        video_processor=Glm4vVideoProcessor(size=PIXELS),
        chat_template=CHAT_TEMPLATE,
    )
    return finish(path, Glm4vForConditionalGeneration(config), processor, seed)
