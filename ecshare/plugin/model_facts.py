# SPDX-License-Identifier: Apache-2.0
"""VllmConfig -> the facts that change bytes -> a namespace.

Two engines share objects if and only if these facts agree. Where an engine computes (device,
attention kernel, parallelism) is left out on purpose: it changes the last bits at most, and a fleet
is seldom of one kind. KV blocks are the exception: kernels differ in how they lay out a block.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ecshare.plugin.weights import fingerprint
from ecshare.store.keys import FORMAT_VERSION, Kind, namespace_digest, object_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Namespace:
    """The facts that must agree for two engines to share objects, and their digest."""

    kind: Kind
    digest: str
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, kind: Kind, facts: Mapping[str, Any]) -> "Namespace":
        """Return the namespace of `facts`, which JSON can hold."""
        return cls(kind, namespace_digest(facts), facts)

    def key(self, name: str | bytes, part: str = "") -> str:
        """Return the object key of `name`, which may be hostile: it is hashed."""
        return object_key(self.kind, self.digest, name, part)


def model_facts(vllm_config: Any, epoch: str, integrity: str) -> dict[str, Any]:
    """Return what says which model computes; options as for `ecshare.facts.encoder_namespace`."""
    model = vllm_config.model_config
    return {
        "format": FORMAT_VERSION,
        "model": str(model.model),
        "revision": str(model.revision or ""),
        "weights": weights_of(model, vllm_config),
        "config": str(getattr(model, "hf_config_path", None) or ""),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or ""),
        "quantization_config": plain(getattr(model, "quantization_config", None)),
        "hf_overrides": plain(model.hf_overrides),
        "tower_lora": has_tower_adapters(vllm_config),
        "epoch": epoch,
        # Engines with different keys reject each other's objects, and must not replace them.
        "integrity": integrity,
    }


def media_facts(vllm_config: Any) -> dict[str, Any]:
    """Return the options that change what the encoder sees, but not vLLM's hash of the media."""
    multimodal = vllm_config.model_config.multimodal_config
    return {
        "mm_processor_kwargs": _anywhere(getattr(multimodal, "mm_processor_kwargs", None)),
        "media_io_kwargs": _anywhere(getattr(multimodal, "media_io_kwargs", None)),
        "mm_encoder_attn_dtype": plain(getattr(multimodal, "mm_encoder_attn_dtype", None)),
        "mm_encoder_fp8_scales": _file_digest(
            getattr(multimodal, "mm_encoder_fp8_scale_path", None)
        ),
        "video_pruning_rate": plain(getattr(multimodal, "video_pruning_rate", None)),
        "video_pruning_method": plain(getattr(multimodal, "video_pruning_method", None)),
    }


def _anywhere(options: Any) -> Any:
    """Return options for media without what says where an engine prepares them.

    vLLM itself has encode engines alone do so on their GPU, and decode videos there by torchcodec.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        return plain(options)
    here = options.get("device") is not None and options.get("backend") == "torchcodec"
    where = {"device", "backend"} if here else {"device"}
    kept = {str(name): _anywhere(value) for name, value in options.items() if name not in where}
    return {name: value for name, value in kept.items() if value != {}}


def _file_digest(path: str | None) -> str:
    """Return what identifies a file by its content; its name if it cannot be read, "" if none."""
    if not path:
        return ""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError:
        return path


def has_tower_adapters(vllm_config: Any) -> bool:
    """Whether LoRA adapters change embeddings: they do where the encoder takes adapters too."""
    return bool(getattr(vllm_config.lora_config, "enable_tower_connector_lora", False))


def weights_of(model: Any, vllm_config: Any) -> str:
    """Fingerprint the weights of `model`, the engine's own or the one that guesses.

    Where they cannot be read: the options that say where they are, if any do.
    """
    load = vllm_config.load_config
    found = weights_fingerprint(
        str(model.model),
        str(model.revision or ""),
        str(load.download_dir or ""),
        f"{load.load_format}:{model.seed}",
    )
    elsewhere = getattr(model, "model_weights", None), load.model_loader_extra_config
    return found or (repr(plain(elsewhere)) if any(elsewhere) else "")


@lru_cache(maxsize=4)
def weights_fingerprint(model: str, revision: str, download_dir: str, load_format: str) -> str:
    """Fingerprint the files behind `model`; both connectors of an engine ask, so remember it."""
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


def plain(value: Any) -> Any:
    """Return `value` as JSON can hold it; what is no JSON is named by its repr."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)
