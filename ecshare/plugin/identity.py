# SPDX-License-Identifier: Apache-2.0
"""VllmConfig -> the facts that change bytes -> a namespace.

Two engines share objects if and only if these facts agree. Where an engine computes (device,
attention kernel, parallelism) is left out on purpose: it changes the last bits at most, and a fleet
is seldom of one kind. KV blocks are the exception: kernels differ in how they lay out a block.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ecshare.plugin.compat import cpu_attention_kernel
from ecshare.plugin.weights import fingerprint
from ecshare.store.keys import FORMAT_VERSION, Kind, namespace_digest, object_key

logger = logging.getLogger(__name__)

# With video pruning vLLM appends token positions to the embeddings of videos and pictures alike:
# Qwen2.5-VL four columns, Qwen3-VL five, other models none.
_POSITION_COLUMNS = (0, 4, 5)


@dataclass(frozen=True)
class Namespace:
    """The facts that must agree for two engines to share objects, and their digest."""

    kind: Kind
    digest: str
    facts: Mapping[str, Any]

    def key(self, name: str | bytes, part: str = "") -> str:
        """Return the object key of `name`, which may be hostile: it is hashed."""
        return object_key(self.kind, self.digest, name, part)


def encoder_namespace(vllm_config: Any, epoch: str, integrity: str = "") -> Namespace:
    """Return the namespace of this engine's embeddings.

    `epoch` is the user's own word, to be changed when weights change in place; `integrity` the
    fingerprint of the key that objects are authenticated with.
    """
    facts = _model_facts(vllm_config, epoch, integrity) | _media_facts(vllm_config)
    return _namespace(Kind.EC, facts | {"encoder_width": max(encoder_widths(vllm_config))})


def kv_namespace(
    vllm_config: Any,
    epoch: str,
    integrity: str = "",
    *,
    chunk_blocks: int = 1,
    layer_sets: Sequence[Any] = (),
) -> Namespace:
    """Return the namespace of this engine's KV; options as for `encoder_namespace`.

    `chunk_blocks`: how many blocks are stored as one object. `layer_sets`: which layers are stored
    together, and what they look back to, as JSON can hold it. The block hashes themselves contain
    tokens, media identifiers, LoRA names and cache_salt.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    # The same picture gives other embeddings, so other KV, under other options.
    facts = _model_facts(vllm_config, epoch, integrity) | _media_facts(vllm_config)
    facts |= {
        "cache_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "chunk_blocks": chunk_blocks,
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "num_layers": model.hf_text_config.num_hidden_layers,
        "num_kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "layer_sets": list(layer_sets),
        "layout": 3,
        "page": _page_format(vllm_config),
        "other_dtype_layers": _plain(getattr(cache, "kv_cache_dtype_skip_layers", None)),
        "context": _context_facts(model),
        "draft": _draft_facts(vllm_config),
    }
    return _namespace(Kind.KV, facts)


def tier_namespace(
    offloading_spec: Any, chunk_bytes: int, epoch: str, integrity: str = ""
) -> Namespace:
    """Return the namespace of what vLLM's own offloading keeps; options as for `encoder_namespace`.

    `offloading_spec`: all that vLLM tells a tier. `chunk_bytes`: size of a chunk, padding included.
    A chunk holds the bytes of all ranks, one after the other, in an order that is vLLM's affair:
    its version counts, and so do the parallel sizes, even where vLLM calls the bytes independent of
    them. What it does not tell is in `epoch`.
    """
    from vllm import __version__
    from vllm.platforms import current_platform

    config = offloading_spec.config
    parallel = config.parallel
    facts = {
        "format": FORMAT_VERSION,
        "tier": 1,
        "vllm": __version__,
        "model": config.model.name,
        "weights": _weights_fingerprint(config.model.name, "", "", ""),
        "cache_dtype": config.model.dtype,
        "bytes_per_chunk": chunk_bytes,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "groups": [
            [group.group_id, group.tokens_per_block, list(group.layer_names)]
            for group in config.groups
        ],
        "ranks": [
            parallel.world_size,
            parallel.tp_size,
            parallel.pp_size,
            parallel.pcp_size,
            parallel.dcp_size,
        ],
        "replicated_layout": offloading_spec.replicated_layout,
        "canonical_layout": config.canonical_layout,
        "kv_cache_layout": config.kv_cache_layout or "",
        "device": str(current_platform.device_name),
        "epoch": epoch,
        "integrity": integrity,
    }
    return _namespace(Kind.KV, facts)


def _media_facts(vllm_config: Any) -> dict[str, Any]:
    """Return the options that are no part of vLLM's media hash, though they change what the encoder
    sees or drops."""
    multimodal = vllm_config.model_config.multimodal_config
    return {
        "mm_processor_kwargs": _anywhere(getattr(multimodal, "mm_processor_kwargs", None)),
        "media_io_kwargs": _anywhere(getattr(multimodal, "media_io_kwargs", None)),
        "mm_encoder_attn_dtype": _plain(getattr(multimodal, "mm_encoder_attn_dtype", None)),
        "mm_encoder_fp8_scales": _file_digest(
            getattr(multimodal, "mm_encoder_fp8_scale_path", None)
        ),
        "video_pruning_rate": _plain(getattr(multimodal, "video_pruning_rate", None)),
        "video_pruning_method": _plain(getattr(multimodal, "video_pruning_method", None)),
    }


def _anywhere(options: Any) -> Any:
    """Return options for media without what says where an engine prepares them.

    vLLM itself has encode engines alone do so on their GPU, and decode videos there by torchcodec.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        return _plain(options)
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


def _context_facts(model: Any) -> list[Any]:
    """Return what follows from the longest context that an engine serves.

    Not that itself: few models compute other KV for it. LongRoPE has two sets of factors, and vLLM
    takes one of them for good (`Phi3LongRoPEScaledRotaryEmbedding`); Llama 4 scales its attention
    where the context is long, unless the generation config says otherwise (`Llama4ForCausalLM`).
    """
    facts: list[Any] = []
    for rope in _long_ropes(model.hf_text_config):
        original = rope.get("original_max_position_embeddings") or getattr(
            model.hf_text_config, "original_max_position_embeddings", 0
        )
        facts.append(model.max_model_len > int(original or 0))
    if any(name.startswith("Llama4") for name in model.architectures):
        said = model.try_get_generation_config() | model.override_generation_config
        facts.append(_plain(said.get("attn_temperature_tuning", model.max_model_len > 32768)))
    return facts


def _long_ropes(text_config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary parameters of kinds of layers that have other factors for long contexts."""
    given: Any = getattr(text_config, "rope_parameters", None)
    given = given or getattr(text_config, "rope_scaling", None) or {}
    for rope in (given, *given.values()):
        if isinstance(rope, Mapping) and "long_factor" in rope:
            yield rope


def _draft_facts(vllm_config: Any) -> list[str]:
    """Return which model guesses tokens ahead, if one does: its KV lies in the same blocks."""
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    # Where nothing or a part of the model itself guesses, vLLM names the model here.
    if draft is None or draft.model == vllm_config.model_config.model:
        return []
    return [str(draft.model), str(draft.revision or ""), _weights_of(draft, vllm_config)]


def _page_format(vllm_config: Any) -> str:
    """Return how the attention kernels lay out the inside of a block, as far as the device says.

    CPU kernels repack keys for their instruction set: blocks of one shape, read by another CPU or a
    GPU, would be other numbers. GPU kernels of one vendor agree where their blocks' shapes do.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return str(current_platform.device_name)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    kernel = cpu_attention_kernel(
        model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype
    )
    return f"cpu-{kernel}"


def has_tower_adapters(vllm_config: Any) -> bool:
    """Whether LoRA adapters change embeddings: they do where the encoder takes adapters too."""
    return bool(getattr(vllm_config.lora_config, "enable_tower_connector_lora", False))


def adapter_fingerprint(folder: Path) -> str:
    """Return what identifies the LoRA adapter in `folder` by its content; "" if that is unknown.

    Its name does not: adapters are trained further and loaded again under the same name. Reads
    files unless they are as they were the last time; any thread but vLLM's.
    """
    try:
        files = tuple(
            (entry.name, entry.stat().st_size, entry.stat().st_mtime_ns)
            for entry in sorted(folder.iterdir())
        )
        return _adapter_fingerprint(folder, files)
    except (OSError, ValueError, KeyError) as exc:
        logger.warning(
            "Cannot read the LoRA adapter %s (%s): what is computed with it is not shared.",
            folder,
            exc,
        )
        return ""


@lru_cache(maxsize=256)
def _adapter_fingerprint(folder: Path, files: tuple[tuple[str, int, int], ...]) -> str:
    """Fingerprint `folder`; `files` (names, sizes, times) is there to tell its versions apart."""
    if not files:
        raise FileNotFoundError("the folder is empty")
    return fingerprint(folder)


def encoder_widths(vllm_config: Any) -> frozenset[int]:
    """Return the widths, in elements, that an embedding of this model may have.

    Most encoders give the language model's own width. Some pack the features of several layers side
    by side (DeepStack), and video pruning adds columns.
    """
    model = vllm_config.model_config
    width = int(model.get_inputs_embeds_size())
    packed = {width * levels for levels in _packed_levels(model.hf_config)}
    rate = getattr(model.multimodal_config, "video_pruning_rate", None)
    columns = _POSITION_COLUMNS if rate else (0,)
    return frozenset(wide + more for wide in packed for more in columns)


def _packed_levels(config: Any) -> set[int]:
    """Return from how many layers an embedding may hold features, each as wide as the text's."""
    # Granite 4 Vision: only what is injected, each at a layer of its own.
    layerwise = getattr(config, "deepstack_layer_map", None)
    if layerwise is not None:
        return {len(layerwise) + len(getattr(config, "spatial_target_layers", None) or ())}
    # An Omni model's towers belong to its thinker.
    config = getattr(config, "thinker_config", None) or config
    vision = getattr(config, "vision_config", None)
    audio = getattr(config, "audio_config", None)
    levels = {1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())}
    if audio is not None:
        # MOSS-Audio packs as well, three layers by default, and its configuration may be a plain
        # mapping; beside Qwen3-Omni's packed pictures, sound is plain.
        fields = audio if isinstance(audio, Mapping) else getattr(audio, "__dict__", {})
        default = 3 if getattr(config, "model_type", "") == "moss_audio" else 0
        listed = fields.get("deepstack_encoder_layer_indexes")
        layers = default if listed is None else len(listed)
        injected = getattr(config, "deepstack_num_inject_layers", None)
        levels |= {1, 1 + (layers if injected is None else min(layers, int(injected)))}
    return levels


def _namespace(kind: Kind, facts: dict[str, Any]) -> Namespace:
    return Namespace(kind, namespace_digest(facts), facts)


def _model_facts(vllm_config: Any, epoch: str, integrity: str) -> dict[str, Any]:
    model = vllm_config.model_config
    return {
        "format": FORMAT_VERSION,
        "model": str(model.model),
        "revision": str(model.revision or ""),
        "weights": _weights_of(model, vllm_config),
        "config": str(getattr(model, "hf_config_path", None) or ""),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or ""),
        "quantization_config": _plain(getattr(model, "quantization_config", None)),
        "hf_overrides": _plain(model.hf_overrides),
        "tower_lora": has_tower_adapters(vllm_config),
        "epoch": epoch,
        # Engines with different keys reject each other's objects, and must not replace them.
        "integrity": integrity,
    }


def _weights_of(model: Any, vllm_config: Any) -> str:
    """Fingerprint the weights of `model`, the engine's own or the one that guesses.

    Where they cannot be read: the options that say where they are, if any do.
    """
    load = vllm_config.load_config
    found = _weights_fingerprint(
        str(model.model),
        str(model.revision or ""),
        str(load.download_dir or ""),
        f"{load.load_format}:{model.seed}",
    )
    elsewhere = getattr(model, "model_weights", None), load.model_loader_extra_config
    return found or (repr(_plain(elsewhere)) if any(elsewhere) else "")


@lru_cache(maxsize=4)
def _weights_fingerprint(model: str, revision: str, download_dir: str, load_format: str) -> str:
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


def _plain(value: Any) -> Any:
    """Return `value` as JSON can hold it; what is no JSON is named by its repr."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)
