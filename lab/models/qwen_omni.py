# SPDX-License-Identifier: Apache-2.0
"""Qwen's omni models: pictures, videos and sound. Only the thinker, which vLLM serves, is real."""

from pathlib import Path

from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5OmniConfig,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeProcessor,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)

from lab.models.building import (
    MEL_BINS,
    audio_config,
    chat_template,
    finish,
    text_config,
    train_tokenizer,
)
from lab.models.qwen_vl import INTERLEAVED_ROPE, ROPE, pixels, vision_tower

NAMED = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
CHAT_TEMPLATE = chat_template(
    {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
        "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
    }
)


def make_qwen25_omni(path: str | Path, seed: int = 0) -> Path:
    """Write the thinker of a Qwen2.5-Omni checkpoint of about 5 MB to `path` and return it."""
    tokenizer = train_tokenizer(list(NAMED.values()), CHAT_TEMPLATE, NAMED)
    text = text_config(tokenizer, rope_parameters=ROPE, tie_word_embeddings=False)
    thinker = {
        "text_config": text,
        "vision_config": vision_tower(text, fullatt_block_indexes=[1]),
        "audio_config": audio_config(output_dim=text["hidden_size"]),
        **_token_ids(tokenizer, "index"),
    }
    config = Qwen2_5OmniConfig(
        thinker_config=thinker,
        architectures=["Qwen2_5OmniModel"],
        enable_audio_output=False,
        dtype="float32",
    )
    shown = pixels(28)
    processor = Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(**shown),
        video_processor=Qwen2VLVideoProcessor(**shown),
        feature_extractor=WhisperFeatureExtractor(feature_size=MEL_BINS),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    model = Qwen2_5OmniThinkerForConditionalGeneration(config.thinker_config)
    return finish(path, model, processor, seed, {"": "thinker."}, config)


def make_qwen3_omni(path: str | Path, seed: int = 0) -> Path:
    """Write the thinker of a Qwen3-Omni checkpoint of about 6 MB to `path` and return it.

    The language model has experts; an embedding of a picture is three times as wide as it.
    """
    tokenizer = train_tokenizer(list(NAMED.values()), CHAT_TEMPLATE, NAMED)
    text = text_config(
        tokenizer,
        head_dim=32,
        rope_parameters=INTERLEAVED_ROPE,
        tie_word_embeddings=False,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )
    thinker = {
        "text_config": text,
        "vision_config": vision_tower(
            text,
            depth=3,
            deepstack_visual_indexes=[0, 1],
            num_position_embeddings=16 * 16,
            # Only vLLM reads these.
            image_size=16 * 16,
            apply_vit_abs_pos_embed=True,
        ),
        "audio_config": audio_config(output_dim=text["hidden_size"], downsample_hidden_size=32),
        **_token_ids(tokenizer, "id"),
    }
    config = Qwen3OmniMoeConfig(
        thinker_config=thinker,
        architectures=["Qwen3OmniMoeForConditionalGeneration"],
        enable_audio_output=False,
        dtype="float32",
    )
    shown = pixels(32) | {"patch_size": 16}
    processor = Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(**shown),
        video_processor=Qwen2VLVideoProcessor(**shown),
        feature_extractor=WhisperFeatureExtractor(feature_size=MEL_BINS),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    model = Qwen3OmniMoeThinkerForConditionalGeneration(config.thinker_config)
    return finish(path, model, processor, seed, {"": "thinker."}, config)


def _token_ids(tokenizer: PreTrainedTokenizerFast, kind: str) -> dict[str, int]:
    """Return the ids of special tokens; `kind` ends the names of those that stand for an item."""
    token = tokenizer.convert_tokens_to_ids
    return {
        **{
            f"{item}_token_{kind}": token(NAMED[f"{item}_token"])
            for item in ("image", "audio", "video")
        },
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
        "audio_start_token_id": token("<|audio_start|>"),
        "audio_end_token_id": token("<|audio_end|>"),
    }
