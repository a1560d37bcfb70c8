# SPDX-License-Identifier: Apache-2.0
"""Small vision-language models, made on the spot: random weights, seeded, no network.

They are real checkpoints of real architectures, a few MB each, so that every stage of vLLM runs.
Their answers mean nothing, but they depend on the prompt, the picture and the seed (see
`_draw_weights`): whoever loses an embedding or a KV block gets other tokens.

    python -m ecshare.testing.models qwen2.5-vl DIR [--seed N]
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.utils import logging as transformers_logging

MAX_POSITIONS = 8192
# Twice what keeps variances equal. At once, attention is nearly uniform: the mean over a picture's
# tokens is the same for every picture, and so is the answer.
ATTENTION_GAIN = 2.0
BIAS_STD = 0.08
MAX_LEARNED_TOKENS = 1024

QWEN_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
QWEN_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] in ('image', 'image_url') -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] in ('video', 'video_url') -%}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
# Any English gives a usable vocabulary. Bytes that no merge covers are tokens of their own.
TRAINING_TEXT = (
    "You are a helpful assistant. Describe this picture. What is in the picture? What is the "
    "difference between these two pictures? Compare the first picture with the second picture. "
    "The picture shows a red square on a blue ground, a green circle over a yellow line, and a "
    "small white cat that sits in front of an old stone house. How many people are there? There "
    "are three people, two dogs and one car. Which colour is the largest shape? Answer in one "
    "sentence. Tell me a story about the sea, the wind and the stars. Why is the sky blue? What "
    "comes next? One, two, three, four, five, six, seven, eight, nine, ten, 0123456789."
)


def make_qwen25_vl(path: str | Path, seed: int = 0) -> Path:
    """Write a Qwen2.5-VL checkpoint of about 6 MB to `path` and return it.

    Two kv heads and two vision heads, so that it also runs with `--tensor-parallel-size 2`.
    The same seed gives the same files. Raises FileExistsError if `path` is there.
    """
    tokenizer = _train_tokenizer(QWEN_SPECIAL_TOKENS, QWEN_CHAT_TEMPLATE)
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=28 * 28 * 1024),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(min_pixels=56 * 56, max_pixels=28 * 28 * 1024),
        chat_template=QWEN_CHAT_TEMPLATE,
    )
    token = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        # A head of 32 has 16 rotary frequencies: 4 for time, 6 each for height and width.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [4, 6, 6],
        },
        "bos_token_id": token("<|endoftext|>"),
        "eos_token_id": token("<|im_end|>"),
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        dtype="float32",
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    _draw_weights(model, seed)
    _silence(model.lm_head, tokenizer)
    ids = {name: text[name] for name in ("bos_token_id", "eos_token_id")}
    return _save(Path(path), model, processor, GenerationConfig(do_sample=False, **ids))


def _train_tokenizer(special_tokens: Sequence[str], chat_template: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every text has tokens, and the same ones each time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_LEARNED_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=chat_template,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Draw every matrix and bias from one seeded stream; leave the norms at one.

    Matrices keep variances equal (std = 1 / sqrt(inputs)), those of attention are wider, and
    embeddings have unit variance, so that no token is drowned by the layers above it.
    """
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_q" in name:
                continue
            if parameter.dim() == 1:
                std = BIAS_STD
            elif "embed_tokens" in name:
                std = 1.0
            else:
                inputs = parameter[0].numel()
                std = (ATTENTION_GAIN if "attn" in name else 1.0) / math.sqrt(inputs)
            parameter.normal_(0.0, std, generator=stream)


def _silence(lm_head: nn.Linear, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give the special tokens a logit of zero, so that greedy answers are text and do not stop."""
    with torch.no_grad():
        lm_head.weight[tokenizer.all_special_ids] = 0.0
        lm_head.weight[list(tokenizer.added_tokens_decoder)] = 0.0


def _save(
    path: Path, model: PreTrainedModel, processor: ProcessorMixin, config: GenerationConfig
) -> Path:
    """Write everything to a folder beside `path`, then rename: it is there whole or not at all."""
    if path.exists():
        raise FileExistsError(f"{path} is there already; remove it or choose another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        built = Path(scratch) / "model"
        model.save_pretrained(built)
        processor.save_pretrained(built)
        config.save_pretrained(built)
        built.rename(path)
    return path


FAMILIES: dict[str, Callable[[Path, int], Path]] = {"qwen2.5-vl": make_qwen25_vl}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0, or 1 with one sentence on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m ecshare.testing.models", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("dir", type=Path, metavar="DIR", help="where to; must not exist yet")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other weights")
    options = parser.parse_args(arguments)
    transformers_logging.disable_progress_bar()
    try:
        FAMILIES[options.family](options.dir, options.seed)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    print(options.dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
