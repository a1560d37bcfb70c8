# SPDX-License-Identifier: Apache-2.0
"""Models that hear: Qwen2-Audio and Audio Flamingo 3, 25 tokens a second."""

from pathlib import Path

from transformers import (
    AudioFlamingo3Config,
    AudioFlamingo3ForConditionalGeneration,
    AudioFlamingo3Processor,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
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

MEDIA_TOKENS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
CHAT_TEMPLATE = chat_template({"audio": "".join(MEDIA_TOKENS)})
SOUND_TOKEN = "<sound>"
PUBLISHED_NAMES = {"language_model.model.model.": "language_model.model."}


def make_qwen2_audio(path: str | Path, seed: int = 0) -> Path:
    """Write a Qwen2-Audio checkpoint of about 4 MB to `path` and return it.

    As in the real model, all audio is padded to 30 s before it is encoded.
    """
    tokenizer = train_tokenizer(MEDIA_TOKENS, CHAT_TEMPLATE)
    config = Qwen2AudioConfig(
        audio_config=audio_config(),
        text_config=text_config(tokenizer, model_type="qwen2"),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        dtype="float32",
    )
    processor = Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=MEL_BINS),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    return finish(
        path, Qwen2AudioForConditionalGeneration(config), processor, seed, PUBLISHED_NAMES
    )


def make_audio_flamingo3(path: str | Path, seed: int = 0) -> Path:
    """Write an Audio Flamingo 3 checkpoint of about 4 MB to `path` and return it.

    Audio is cut into windows of 30 s.
    """
    template = chat_template({"audio": SOUND_TOKEN})
    tokenizer = train_tokenizer([SOUND_TOKEN], template)
    config = AudioFlamingo3Config(
        audio_config=audio_config(),
        text_config=text_config(tokenizer, model_type="qwen2"),
        audio_token_id=tokenizer.convert_tokens_to_ids(SOUND_TOKEN),
        dtype="float32",
    )
    processor = AudioFlamingo3Processor(
        feature_extractor=WhisperFeatureExtractor(feature_size=MEL_BINS),
        tokenizer=tokenizer,
        chat_template=template,
    )
    return finish(
        path, AudioFlamingo3ForConditionalGeneration(config), processor, seed, PUBLISHED_NAMES
    )
