# SPDX-License-Identifier: Apache-2.0
"""Draft models for speculative decoding that guess well, and whose KV has another shape.

Each is a `make_qwen2` model again, so it guesses what that model answers, as long as its own KV is
right. In those that are models of their own every KV head is there twice.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

LAYER = "model.layers.0."


def make_draft(path: str | Path, target: Path) -> Path:
    """Write a draft model for the checkpoint `target` to `path` and return it."""
    config = Qwen2Config.from_pretrained(target)
    weights = _with_each_head_twice(load_file(target / SAFE_WEIGHTS_NAME), config)
    config.num_key_value_heads *= 2
    draft = Qwen2ForCausalLM(config)
    draft.load_state_dict(weights)
    draft.save_pretrained(path)
    return Path(path)


def make_eagle(path: str | Path, target: Path) -> Path:
    """Write an EAGLE head for the checkpoint `target`, which has one layer, to `path`; return it.

    A head is one layer. It sees what the target computes of a token, and the embedding of the next
    one. From the latter alone this head computes almost what the target will.
    """
    config = Qwen2Config.from_pretrained(target)
    weights = _with_each_head_twice(load_file(target / SAFE_WEIGHTS_NAME), config)
    size = config.hidden_size
    embeddings = weights["model.embed_tokens.weight"]
    head = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if name.startswith(LAYER) and "input_layernorm" not in name
    }
    # A head has no norm before its layer.
    head["embed_tokens.weight"] = embeddings / embeddings.square().mean(1, keepdim=True).sqrt()
    head["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    head["layers.0.self_attn.o_proj.bias"] = torch.zeros(size)
    return _written(Path(path), head, _llama_config(config))


def make_eagle3(path: str | Path, target: Path) -> Path:
    """Write an EAGLE 3 head for the checkpoint `target`, which has one layer, to `path`; return it.

    It differs from `make_eagle`: its attention sees the embedding beside what the target computes,
    but only the latter is added to what follows. So it guesses well for a target whose embeddings
    are small, as those of `with_small_embeddings`.
    """
    config = Qwen2Config.from_pretrained(target)
    weights = _with_each_head_twice(load_file(target / SAFE_WEIGHTS_NAME), config)
    size = config.hidden_size
    head = {
        name.replace("model.layers.0.", "midlayer."): weight
        for name, weight in weights.items()
        if name.startswith(LAYER)
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        full = f"midlayer.self_attn.{name}.weight"
        head[full] = torch.cat([head[full], torch.zeros_like(head[full])], 1)
    head["midlayer.hidden_norm.weight"] = torch.ones(size)
    head["midlayer.self_attn.o_proj.bias"] = torch.zeros(size)
    head["fc.weight"] = torch.zeros(size, size)
    head["norm.weight"] = weights["model.norm.weight"]
    head["lm_head.weight"] = weights["lm_head.weight"].clone()
    head["embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    described = {
        **_llama_config(config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1], "use_aux_hidden_state": True},
    }
    return _written(Path(path), head, described)


def with_small_embeddings(target: Path) -> Path:
    """Divide the embeddings of a checkpoint by 50, and return its folder."""
    weights = load_file(target / SAFE_WEIGHTS_NAME)
    weights["model.embed_tokens.weight"] /= 50
    save_file(weights, target / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    return target


def add_mtp_layer(target: Path) -> Path:
    """Give the checkpoint `target`, which has one layer, a layer for multi-token prediction.

    It becomes a MiMo model, which is Qwen2 with such layers. Returns its folder.
    """
    described = json.loads((target / CONFIG_NAME).read_text())
    described |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    weights = load_file(target / SAFE_WEIGHTS_NAME)
    size = described["hidden_size"]
    layer = "model.mtp_layers.0."
    weights |= {
        name.replace(LAYER, layer): weight.clone()
        for name, weight in weights.items()
        if name.startswith(LAYER)
    }
    for norm in ("token", "hidden", "final"):
        weights[f"{layer}{norm}_layernorm.weight"] = torch.ones(size)
    weights[f"{layer}input_proj.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], 1)
    return _written(target, weights, described)


def _written(folder: Path, weights: dict[str, Tensor], described: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    (folder / CONFIG_NAME).write_text(json.dumps(described))
    return folder


def _with_each_head_twice(weights: dict[str, Tensor], config: Qwen2Config) -> dict[str, Tensor]:
    """Return `weights` for twice as many KV heads: of each group of queries, half has a copy."""
    return {
        name: _twice(weight, config.num_key_value_heads)
        if ".k_proj." in name or ".v_proj." in name
        else weight
        for name, weight in weights.items()
    }


def _twice(weight: Tensor, num_heads: int) -> Tensor:
    by_head = weight.view(num_heads, -1, *weight.shape[1:])
    return by_head.repeat_interleave(2, 0).flatten(0, 1).contiguous()


def _llama_config(config: Qwen2Config) -> dict[str, Any]:
    """Return the configuration of a head for a Qwen2 model: vLLM has heads of Llama's form."""
    kept = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps"),
        *("hidden_act", "max_position_embeddings", "rope_parameters", "bos_token_id"),
        "eos_token_id",
    )
    return {
        **{name: getattr(config, name) for name in kept},
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_key_value_heads": 2 * config.num_key_value_heads,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
