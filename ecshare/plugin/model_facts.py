# SPDX-License-Identifier: Apache-2.0
"""The facts of a VllmConfig that change stored bytes, and the namespace that they define.

Two engines share objects if and only if these facts agree. The device, the attention kernel and the
parallelism are left out on purpose: they change the last bits at most, and fleets are often mixed.
KV blocks are the exception, because kernels differ in how they lay out a block.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ecshare.plugin.compat import option
from ecshare.plugin.weights import fingerprint
from ecshare.store.keys import FORMAT_VERSION, Key, Kind, namespace_digest, object_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Namespace:
    """The facts that must agree for two engines to share objects, and their digest."""

    kind: Kind
    digest: str
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, kind: Kind, facts: Mapping[str, Any]) -> "Namespace":
        """Return the namespace of `facts`, which must be JSON values."""
        return cls(kind, namespace_digest(facts), facts)

    def key(self, name: str | bytes) -> Key:
        """Return the object key of `name`. The name may be hostile: it is hashed."""
        return object_key(self.kind, self.digest, name)


def model_facts(vllm_config: Any, epoch: str, integrity: str) -> dict[str, Any]:
    """Return the facts about the model. Arguments are those of `encoder_namespace`."""
    model = vllm_config.model_config
    return {
        "format": FORMAT_VERSION,
        "model": str(model.model),
        "revision": str(model.revision or ""),
        "weights": weights_identity(model, vllm_config),
        "config": str(option(model, "hf_config_path") or ""),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or ""),
        "quantization_config": json_value(option(model, "quantization_config")),
        "hf_overrides": json_value(model.hf_overrides),
        "tower_lora": has_tower_adapters(vllm_config),
        "epoch": epoch,
        # Engines with different keys reject each other's objects, and must not replace them.
        "integrity": integrity,
    }


def media_facts(vllm_config: Any) -> dict[str, Any]:
    """Return the options that change the encoder's input, but not vLLM's hash of the media."""
    multimodal = vllm_config.model_config.multimodal_config
    return {
        "mm_processor_kwargs": _without_placement(option(multimodal, "mm_processor_kwargs")),
        "media_io_kwargs": _without_placement(option(multimodal, "media_io_kwargs")),
        "mm_encoder_attn_dtype": json_value(option(multimodal, "mm_encoder_attn_dtype")),
        "mm_encoder_fp8_scales": _file_digest(option(multimodal, "mm_encoder_fp8_scale_path")),
        "video_pruning_rate": json_value(option(multimodal, "video_pruning_rate")),
        "video_pruning_method": json_value(option(multimodal, "video_pruning_method")),
    }


def _without_placement(options: Any) -> Any:
    """Return media options without those that choose the device on which media are prepared.

    vLLM itself lets only encode engines prepare media, and decode videos by torchcodec, on a GPU.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        return json_value(options)
    on_device = options.get("device") is not None and options.get("backend") == "torchcodec"
    placement = {"device", "backend"} if on_device else {"device"}
    kept = {
        str(name): _without_placement(value)
        for name, value in options.items()
        if name not in placement
    }
    return {name: value for name, value in kept.items() if value != {}}


def _file_digest(path: str | None) -> str:
    """Return a digest of the file's content; its path if it cannot be read, "" without a path."""
    if not path:
        return ""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError:
        return path


def has_tower_adapters(vllm_config: Any) -> bool:
    """Return whether LoRA adapters change embeddings, because they apply to the encoder too."""
    return bool(option(vllm_config.lora_config, "enable_tower_connector_lora"))


def weights_identity(model: Any, vllm_config: Any) -> str:
    """Fingerprint the weights of `model`: the engine's own or its draft model.

    If the files cannot be read, return the options that say where they are stored, if any.
    """
    load = vllm_config.load_config
    found = weights_fingerprint(
        str(model.model),
        str(model.revision or ""),
        str(load.download_dir or ""),
        f"{load.load_format}:{model.seed}",
    )
    elsewhere = option(model, "model_weights"), load.model_loader_extra_config
    return found or (repr(json_value(elsewhere)) if any(elsewhere) else "")


@lru_cache(maxsize=4)
def weights_fingerprint(model: str, revision: str, download_dir: str, load_format: str) -> str:
    """Fingerprint the files of `model`. Cached, because both connectors of an engine ask."""
    if load_format.partition(":")[0].endswith("dummy"):
        return load_format
    folder = Path(model)
    try:
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(
                snapshot_download(
                    model,
                    revision=revision or None,
                    cache_dir=download_dir or None,
                    local_files_only=True,
                )
            )
        return fingerprint(folder)
    except (OSError, ValueError, KeyError, ImportError) as exc:
        logger.warning(
            "Cannot read the weight files of %r (%s): the namespace rests on the model's name and "
            "revision alone. Set the option `epoch` and change it whenever the weights change.",
            model,
            exc,
        )
        return ""


def json_value(value: Any) -> Any:
    """Return `value` as JSON values. Values that JSON cannot hold become their repr."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)
