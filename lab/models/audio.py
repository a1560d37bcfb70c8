# SPDX-License-Identifier: Apache-2.0
"""Qwen2-Audio: sound, 25 tokens a second."""

from pathlib import Path

from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from lab.models.building import chat_template, finish, text_config, train_tokenizer

MEDIA_TOKENS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
CHAT_TEMPLATE = chat_template({"audio": "".join(MEDIA_TOKENS)})
MEL_BINS = 32


def make_qwen2_audio(path: str | Path, seed: int = 0) -> Path:
    """Write a Qwen2-Audio checkpoint of about 4 MB to `path` and return it.

    As in the real model, all audio is padded to 30 s before it is encoded.
    """
    tokenizer = train_tokenizer(MEDIA_TOKENS, CHAT_TEMPLATE)
    audio = {
        "num_mel_bins": MEL_BINS,
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
    }
    config = Qwen2AudioConfig(
        audio_config=audio,
        text_config=text_config(tokenizer, model_type="qwen2"),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        dtype="float32",
    )
    processor = Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=MEL_BINS),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    model = Qwen2AudioForConditionalGeneration(config)
    names = {"language_model.model.model.": "language_model.model."}
    return finish(path, model, processor, seed, names)
