# SPDX-License-Identifier: Apache-2.0
"""The parts of all families: a trained tokenizer, a chat template, drawn weights, files."""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.utils import SAFE_WEIGHTS_NAME

MAX_POSITIONS = 8192
# Twice the value that keeps variances equal. With that value attention is nearly uniform: the mean
# over a picture's tokens, and so the answer, is the same for every picture.
ATTENTION_GAIN = 2.0
BIAS_STD = 0.08
# Where the layer that gives the logits has the weights of the embeddings: a wider embedding is most
# like itself, whatever the layers between add, and an answer repeats one token.
TIED_EMBEDDING_STD = 0.1
MAX_LEARNED_TOKENS = 1024
MEL_BINS = 32
BLANK = "\u0120"  # the blank in byte-level vocabularies

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
CHAT_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
# Any English text gives a usable vocabulary. Bytes without a merge are tokens of their own.
TRAINING_TEXT = (
    "You are a helpful assistant. Describe this picture. What is in the picture? What is the "
    "difference between these two pictures? Compare the first picture with the second picture. "
    "The picture shows a red square on a blue ground, a green circle over a yellow line, and a "
    "small white cat that sits in front of an old stone house. How many people are there? There "
    "are three people, two dogs and one car. Which colour is the largest shape? Answer in one "
    "sentence. Tell me a story about the sea, the wind and the stars. Why is the sky blue? What "
    "comes next? One, two, three, four, five, six, seven, eight, nine, ten, 0123456789."
)


def chat_template(placeholders: Mapping[str, str]) -> str:
    """Return a chat template. `placeholders`: the text that stands for a media item, by modality.

    A part may have vLLM's type name (`image`) or that of its API (`image_url`).
    """
    media = "".join(
        f"{{%- elif part['type'] in ('{modality}', '{modality}_url') -%}}{{{{ '{text}' }}}}"
        for modality, text in placeholders.items()
    )
    return (
        "{%- for message in messages -%}"
        "{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{%- if message['content'] is string -%}{{ message['content'] }}"
        "{%- else -%}{%- for part in message['content'] -%}"
        "{%- if part['type'] == 'text' -%}{{ part['text'] }}" + media + "{%- endif -%}"
        "{%- endfor -%}{%- endif -%}"
        "{{ '<|im_end|>\n' }}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )


def train_tokenizer(
    media_tokens: Sequence[str], template: str, named: Mapping[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: it encodes every text, and always in the same way.

    `named`: those of `media_tokens` that a processor looks up as attributes of the tokenizer, such
    as `image_token`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_LEARNED_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    special_tokens = (*CHAT_TOKENS, *media_tokens)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=dict(named or {}),
    )


def text_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of a text-only model, with its chat template."""
    return train_tokenizer((), chat_template({}))


def text_config(tokenizer: PreTrainedTokenizerFast, **more: Any) -> dict[str, Any]:
    """Return the config of a language model with 4 layers, and KV heads for two ranks."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        "eos_token_id": tokenizer.convert_tokens_to_ids(END_OF_TURN),
        **more,
    }


def vision_config(**more: Any) -> dict[str, Any]:
    """Return the config of a vision transformer with 2 layers."""
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        **more,
    }


def audio_config(**more: Any) -> dict[str, Any]:
    """Return the config of a speech encoder like Whisper's, with 2 layers."""
    return {
        "num_mel_bins": MEL_BINS,
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        **more,
    }


def finish(  # noqa: PLR0913 — all that can differ between two checkpoints
    path: str | Path,
    model: PreTrainedModel,
    processor: ProcessorMixin | PreTrainedTokenizerFast,
    seed: int,
    published_names: Mapping[str, str] | None = None,
    config: PreTrainedConfig | None = None,
) -> Path:
    """Draw the weights of `model` and write everything to `path`, which must not exist.

    `published_names`: prefixes of weight names, from those that transformers writes to those that
    published checkpoints have and vLLM reads. `processor`: for a text-only model, its tokenizer.
    `config`: that of the checkpoint, if `model` is only a part of it.

    Raises:
        FileExistsError: `path` exists.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    draw_weights(model, seed)
    _mute_non_words(model.get_output_embeddings(), tokenizer)
    ends = {
        "bos_token_id": tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        "eos_token_id": tokenizer.convert_tokens_to_ids(END_OF_TURN),
    }
    with _atomic_folder(Path(path)) as built:
        model.save_pretrained(built)
        if published_names:
            _rename(built / SAFE_WEIGHTS_NAME, published_names)
        if config is not None:
            config.save_pretrained(built)
        processor.save_pretrained(built)
        GenerationConfig(do_sample=False, **ends).save_pretrained(built)
    return Path(path)


def draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Draw every matrix and bias from one seeded generator; norms stay at one.

    Matrices preserve variances (std = 1 / sqrt(inputs)). Those of attention are wider; where a norm
    would cancel this, the norm restores it. Embeddings have unit variance, so that the layers above
    do not drown a token.
    """
    stream = torch.Generator().manual_seed(seed)
    embeddings = model.get_input_embeddings()
    is_tied = model.get_output_embeddings().weight is embeddings.weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.fill_(ATTENTION_GAIN)
            if "norm" in name or "ln_" in name:
                continue
            if parameter.dim() == 1:
                std = BIAS_STD
            elif "embed_tokens" in name:
                # Some models scale their embeddings.
                std = TIED_EMBEDDING_STD if is_tied else 1.0
                std /= getattr(embeddings, "scalar_embed_scale", 1.0)
            else:
                inputs = parameter[0].numel()
                std = (
                    ATTENTION_GAIN if "attn" in name or "attention" in name else 1.0
                ) / math.sqrt(inputs)
            parameter.normal_(0.0, std, generator=stream)


def _mute_non_words(lm_head: nn.Linear, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give all tokens except words a logit of zero, so that greedy answers do not stop.

    A word is a blank and letters. So the text of an answer is tokenized to the generated tokens
    again, and a conversation goes on with the computed tokens, as it mostly does with trained
    models.
    """
    muted = torch.ones(lm_head.weight.shape[0], dtype=torch.bool)
    muted[list(_words(tokenizer))] = False
    with torch.no_grad():
        lm_head.weight[muted] = 0.0


def _words(tokenizer: PreTrainedTokenizerFast) -> Iterator[int]:
    for text, token in tokenizer.get_vocab().items():
        word = text.removeprefix(BLANK)
        is_word = word != text and word.isascii() and word.isalpha()
        if is_word and tokenizer.encode(f" {word}", add_special_tokens=False) == [token]:
            yield token


def _rename(file: Path, published_names: Mapping[str, str]) -> None:
    """Rename the prefixes of the tensors in a safetensors file."""
    renamed = {}
    for name, tensor in load_file(file).items():
        prefix = next((prefix for prefix in published_names if name.startswith(prefix)), "")
        renamed[published_names.get(prefix, prefix) + name.removeprefix(prefix)] = tensor
    save_file(renamed, file, metadata={"format": "pt"})


@contextmanager
def _atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a folder beside `path` to write to. It becomes `path` if the block succeeds.

    Raises:
        FileExistsError: `path` exists.
    """
    if path.exists():
        raise FileExistsError(f"{path} is there already; remove it or choose another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        built = Path(scratch) / "model"
        yield built
        built.rename(path)
