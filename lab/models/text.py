# SPDX-License-Identifier: Apache-2.0
"""Qwen2, text only, and LoRA adapters for text models."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import SAFE_WEIGHTS_NAME

from lab.models.building import finish, text_config, text_tokenizer

# Of attention, and of the short convolutions of LFM2.
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "self_attn.out_proj", "conv.in_proj")
# Large enough to change greedy tokens.
ADAPTER_GAIN = 4.0


def make_qwen2(path: str | Path, seed: int = 0, **sizes: int) -> Path:
    """Write a Qwen2 checkpoint of about 3 MB to `path` and return it.

    `sizes` override those of `text_config`, by their names in the model's configuration.
    """
    tokenizer = text_tokenizer()
    config = Qwen2Config(**text_config(tokenizer, **sizes), dtype="float32")
    return finish(path, Qwen2ForCausalLM(config), tokenizer, seed)


def make_adapter(path: str | Path, model: Path, seed: int = 0, rank: int = 8) -> Path:
    """Write a LoRA adapter for a text model to `path`, in PEFT's format, and return it.

    An existing adapter is overwritten, as training does. Another seed gives other tokens.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [name.rpartition(".")[2] for name in ADAPTED],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    save_file(_factors(model, seed, rank), folder / "adapter_model.safetensors")
    return folder


def _factors(model: Path, seed: int, rank: int) -> dict[str, torch.Tensor]:
    """Return the two factors of the update to each projection."""
    stream = torch.Generator().manual_seed(seed)
    factors = {}
    for name, weight in sorted(load_file(model / SAFE_WEIGHTS_NAME).items()):
        layer = name.removesuffix(".weight")
        if not layer.endswith(ADAPTED):
            continue
        outputs, inputs = weight.shape
        down = torch.randn(rank, inputs, generator=stream) / math.sqrt(inputs)
        up = torch.randn(outputs, rank, generator=stream) * ADAPTER_GAIN / math.sqrt(rank)
        factors[f"base_model.model.{layer}.lora_A.weight"] = down
        factors[f"base_model.model.{layer}.lora_B.weight"] = up
    return factors
