# SPDX-License-Identifier: Apache-2.0
"""Finds what kvshare decides about the layers of a model, grouped by vLLM's own code.

The model is built without weights, on torch's meta device, with a configuration of the lab, or else
with the default values of transformers or vLLM. Many models cannot be built so: some have no such
configuration in this environment, and some kernels need a GPU.

Options and the kind of device are those of an engine on a GPU with vLLM's prefix cache.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto
from vllm.config import ModelConfig, VllmConfig, get_layers_from_vllm_config
from vllm.config.vllm import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec

from kvshare.chunks.layers import refusal
from kvshare.chunks.layouts import layout_for
from lab.models import FAMILIES

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups  # from 0.33 on
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

_USUAL_LAYOUT = "LBNHC"
_BLOCK_TOKENS = 16
_ENDINGS = re.compile("(For(CausalLM|ConditionalGeneration|CausalLMV)|Model|Config)$")


class Shapes:
    """Builds models, and lets kvshare decide about their layers. Keeps its files in `folder`.

    A process may have one only: it sets up vLLM's process groups.
    """

    def __init__(self, folder: Path) -> None:
        """Make the configurations of the lab's models."""
        self._folder = folder
        self._in_lab: dict[str, Path] = {}
        for name, make in FAMILIES.items():
            path = make(folder / f"lab-{name}", 0)
            for architecture in json.loads((path / "config.json").read_text())["architectures"]:
                self._in_lab.setdefault(architecture, path)
        self._of_transformers = dict(_transformers_configs())
        self._of_vllm = {_stem(name): name for name in map(str, _CONFIG_REGISTRY.values())}

    def kv(self, architecture: str) -> str | None:
        """Return "yes", "yes, hybrid", "yes" and the layout that kvshare asks vLLM for, or "no" and
        the reason; None: the model cannot be built in this environment."""
        try:
            path = self._in_lab.get(architecture) or self._write_config(architecture)
            return None if path is None else _kv(path)
        except Exception:  # noqa: BLE001 — the defaults of a configuration need not fit a model
            return None

    def _write_config(self, architecture: str) -> Path | None:
        make = self._of_transformers.get(architecture)
        name = self._of_vllm.get(_stem(architecture))
        if make is None and name is None:
            return None
        values = (make or _vllm_config_class(str(name)))().to_dict()
        path = Path(tempfile.mkdtemp(dir=self._folder))
        text = json.dumps(values | {"architectures": [architecture]}, default=str)
        (path / "config.json").write_text(text)
        return path


def _stem(name: str) -> str:
    return _ENDINGS.sub("", name).replace("_", "").lower()


def _transformers_configs() -> Iterator[tuple[str, Callable[[], PreTrainedConfig]]]:
    for name in dir(modeling_auto):
        if name.endswith("_MAPPING_NAMES"):
            for model_type, classes in getattr(modeling_auto, name).items():
                if model_type in CONFIG_MAPPING:
                    for each in [classes] if isinstance(classes, str) else classes:
                        yield each, CONFIG_MAPPING[model_type]


def _vllm_config_class(name: str) -> Callable[[], PreTrainedConfig]:
    found: Callable[[], PreTrainedConfig] = next(
        each
        for each in map(_CONFIG_REGISTRY.__getitem__, _CONFIG_REGISTRY)
        if each.__name__ == name
    )
    return found


def _kv(path: Path) -> str:
    config = EngineArgs(
        model=str(path),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        dtype="bfloat16",
        enable_prefix_caching=True,
        trust_remote_code=False,
    ).create_engine_config()
    # vLLM turns both off where the kernels of this CPU cannot continue a prompt.
    config.cache_config.enable_prefix_caching = True
    config.scheduler_config.enable_chunked_prefill = True
    with set_current_vllm_config(config):
        specs = _specs(config)
        with _on_gpu(config):
            layout = layout_for(config)
            reason = _refusal(config, specs, layout)
    if reason is not None:
        return f"no: {reason}"
    if layout is not None:
        return f"yes, in layout `{layout}`"
    return "yes, hybrid" if any(isinstance(s, MambaSpec) for s in specs.values()) else "yes"


def _specs(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Return the spec of each layer's KV cache, as vLLM's model runners collect them."""
    _set_up_groups()
    with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
        initialize_model(config)
    current_platform.update_block_size_for_backend(config)
    found = {}
    kind: Any = AttentionLayerBase
    for name, layer in get_layers_from_vllm_config(config, kind).items():
        # Such a layer uses the cache of another one.
        if not getattr(layer, "kv_sharing_target_layer_name", None):
            spec = layer.get_kv_cache_spec(config)
            if spec is not None:
                found[name] = spec
    return found


def _set_up_groups() -> None:
    if not torch.distributed.is_initialized():
        place = Path(tempfile.mkdtemp()) / "rendezvous"
        init_distributed_environment(1, 0, f"file://{place}", 0, "gloo")
        # The groups of experts exist only if the first model has experts.
        with patch.object(ModelConfig, "get_num_experts", lambda self: 8):
            ensure_model_parallel_initialized(1, 1)


@contextmanager
def _on_gpu(config: VllmConfig) -> Iterator[None]:
    """Set a GPU's device and block size in `config` for the block."""
    cache, device = config.cache_config, config.device_config
    kept = cache.block_size, device.device_type
    cache.block_size, device.device_type = _BLOCK_TOKENS, "cuda"
    try:
        yield
    finally:
        cache.block_size, device.device_type = kept


def _refusal(config: VllmConfig, specs: dict[str, KVCacheSpec], layout: str | None) -> str | None:
    cache = config.cache_config
    if hasattr(cache, "kv_cache_layout"):  # from 0.32 on
        cache.kv_cache_layout = layout or _USUAL_LAYOUT
    groups = get_kv_cache_groups(config, dict(specs))
    # vLLM's engine core sets it so.
    cache.block_size = min(
        (each.kv_cache_spec.block_size for each in groups), default=_BLOCK_TOKENS
    )
    return refusal(config, KVCacheConfig(10, [], groups))
