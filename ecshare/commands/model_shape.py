# SPDX-License-Identifier: Apache-2.0
"""Computes the bytes of a model's KV and embeddings, from its config.json or from options."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from ecshare.commands.arguments import Count
from ecshare.doctor.findings import printable
from ecshare.store.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

_MOST_CONFIG_BYTES = 1 << 20
_MOST_OF_A_FIELD = 10_000_000
# The fields that hold the language model's configuration in that of a multimodal model.
_INNER = ("thinker_config", "text_config", "llm_config", "language_config")
# Fields of models that have layers without KV, but do not list them as `layer_types`.
_HYBRID = ("mamba", "ssm_", "hybrid_override_pattern", "attn_layer_", "layers_block_type")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_TOKEN_BYTES_HELP = "or give --token-bytes, which an engine logs at its start"

_OPTIONS = (
    click.option("--model", metavar="PATH", help="A model's folder, or its config.json."),
    click.option("--layers", type=Count(1), help="Layers with attention."),
    click.option("--kv-heads", type=Count(1), help="KV heads of a layer."),
    click.option("--head-dim", type=Count(1), help="Numbers of a head."),
    click.option(
        "--dtype-bytes", type=click.Choice(["1", "2", "4"]), help="Bytes of a number; default: 2."
    ),
    click.option(
        "--mla-rank",
        type=Count(1),
        help="Instead of heads, for MLA: its numbers of a token and layer, "
        "kv_lora_rank + qk_rope_head_dim.",
    ),
    click.option("--token-bytes", type=Count(1), help="Instead of all these: the KV of a token."),
    click.option(
        "--hidden-size", type=Count(1), help="Numbers of an embedding; default: the model's."
    ),
)


class Given(NamedTuple):
    """The options of `shape_options`."""

    model: str | None = None
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype_bytes: str | None = None
    mla_rank: int | None = None
    token_bytes: int | None = None
    hidden_size: int | None = None

    @property
    def has_kv(self) -> bool:
        """Return whether the options describe KV."""
        return any((self.model, self.layers, self.kv_heads, self.token_bytes, self.mla_rank))


def shape_options(command: F) -> F:
    """Give `command` the options for a model. Its further parameters are the fields of `Given`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def token_bytes(given: Given) -> int:
    """Return the bytes of a token's KV in all layers and on all ranks.

    Raises:
        ConfigError: something is missing or wrong; names the option or the field.
    """
    if given.token_bytes:
        return given.token_bytes
    config = _config(given)
    layers = given.layers or _attention_layers(config)
    return layers * _layer_numbers(given, config) * _number_bytes(given, config)


def embedding_bytes(given: Given) -> int:
    """Return the bytes of one embedding of a media item.

    Raises:
        ConfigError: as `token_bytes`.
    """
    config = _config(given)
    size = given.hidden_size
    if not size:
        size = _field(config, "hidden_size", "--hidden-size")
        vision = config.get("vision_config")
        # Qwen3-VL adds a further embedding for each of these layers.
        deep = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
        size *= 1 + len(deep) if isinstance(deep, list) else 1
    return size * _number_bytes(given, config)


def _layer_numbers(given: Given, config: Mapping[str, Any]) -> int:
    """Return the numbers of a token's KV in one layer."""
    if given.mla_rank:
        return given.mla_rank
    if config.get("kv_lora_rank") and not given.kv_heads:
        rank = _field(config, "kv_lora_rank", "--mla-rank")
        return rank + _field(config, "qk_rope_head_dim", "--mla-rank")
    heads, size = given.kv_heads, given.head_dim
    if not heads:
        name = "num_key_value_heads" if config.get("num_key_value_heads") else "num_attention_heads"
        heads = _field(config, name, "--kv-heads")
    if not size and config.get("head_dim"):
        size = _field(config, "head_dim", "--head-dim")
    if not size:
        size = _field(config, "hidden_size", "--head-dim")
        size //= _field(config, "num_attention_heads", "--head-dim")
    return 2 * heads * size


def _attention_layers(config: Mapping[str, Any]) -> int:
    kinds, found = config.get("layer_types"), 0
    if isinstance(kinds, list):
        found = sum(
            str(kind).endswith("attention") and kind != "linear_attention" for kind in kinds
        )
    elif config.get("full_attention_interval"):
        interval = _field(config, "full_attention_interval", "--layers")
        found = _field(config, "num_hidden_layers", "--layers") // interval
    elif not any(str(name).startswith(_HYBRID) for name in config):
        found = _field(config, "num_hidden_layers", "--layers")
    if not found:
        raise ConfigError(
            "--layers: config.json does not say which layers have attention; give their number, "
            + _TOKEN_BYTES_HELP
        )
    return found


def _number_bytes(given: Given, config: Mapping[str, Any]) -> int:
    if given.dtype_bytes:
        return int(given.dtype_bytes)
    return _DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)


def _field(config: Mapping[str, Any], name: str, option: str) -> int:
    value = config.get(name)
    if value is None:
        where = f"config.json has no {name}" if config else "missing"
        raise ConfigError(f"{option}: {where}; give it, or --model, {_TOKEN_BYTES_HELP}")
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _MOST_OF_A_FIELD:
        shown = printable(ascii(value)[:80])
        raise ConfigError(f"--model: {name} in config.json is {shown}, not a number above 0")
    return int(value)


def _config(given: Given) -> Mapping[str, Any]:
    """Return the fields of config.json, those of the language model last; {}: no model is given."""
    if not given.model:
        return {}
    path = Path(given.model)
    shown = printable(given.model)
    try:
        path = path / "config.json" if path.is_dir() else path
        with path.open("rb") as file:
            text = file.read(_MOST_CONFIG_BYTES + 1)
        if len(text) > _MOST_CONFIG_BYTES:
            raise ConfigError(f"--model: {shown} is larger than any config.json")
        config: Any = json.loads(text)
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"--model: {shown}: {printable(str(exc))}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"--model: {shown} has no JSON object")
    fields: dict[str, Any] = config
    for name in _INNER:
        if isinstance(fields.get(name), dict):
            fields = fields | fields[name]
    return fields
