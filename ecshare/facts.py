# SPDX-License-Identifier: Apache-2.0
"""What separates the embeddings of two engines, and how wide an embedding may be."""

from collections.abc import Mapping
from typing import Any

from ecshare.plugin.compat import option
from ecshare.plugin.model_facts import Namespace, media_facts, model_facts
from ecshare.store.keys import Kind

# With video pruning vLLM appends token positions to the embeddings of videos and pictures alike:
# Qwen2.5-VL four columns, Qwen3-VL five, other models none.
_POSITION_COLUMNS = (0, 4, 5)


def encoder_namespace(vllm_config: Any, epoch: str, integrity: str = "") -> Namespace:
    """Return the namespace of this engine's embeddings.

    `epoch` is the user's own text, changed when weights change in place. `integrity` is the
    fingerprint of the key that authenticates objects.
    """
    facts = model_facts(vllm_config, epoch, integrity) | media_facts(vllm_config)
    return Namespace.of(Kind.EC, facts | {"encoder_width": max(encoder_widths(vllm_config))})


def encoder_widths(vllm_config: Any) -> frozenset[int]:
    """Return the widths, in elements, that an embedding of this model may have.

    Most encoders output the width of the language model. Some concatenate the features of several
    layers (DeepStack), and video pruning adds columns.
    """
    model = vllm_config.model_config
    width = int(model.get_inputs_embeds_size())
    packed = {width * levels for levels in _packed_levels(model.hf_config)}
    rate = option(model.multimodal_config, "video_pruning_rate")
    columns = _POSITION_COLUMNS if rate else (0,)
    return frozenset(wide + more for wide in packed for more in columns)


def _packed_levels(config: Any) -> set[int]:
    """Return how many layers an embedding may concatenate, each as wide as the text model."""
    # Granite 4 Vision: only injected features, each at a layer of its own.
    layerwise = getattr(config, "deepstack_layer_map", None)
    if layerwise is not None:
        return {len(layerwise) + len(getattr(config, "spatial_target_layers", None) or ())}
    # An Omni model's towers belong to its thinker.
    config = getattr(config, "thinker_config", None) or config
    vision = getattr(config, "vision_config", None)
    audio = getattr(config, "audio_config", None)
    levels = {1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())}
    if audio is not None:
        # MOSS-Audio also concatenates, three layers by default; its configuration may be a mapping.
        # Qwen3-Omni concatenates for pictures only, not for sound.
        fields = audio if isinstance(audio, Mapping) else getattr(audio, "__dict__", {})
        default = 3 if getattr(config, "model_type", "") == "moss_audio" else 0
        listed = fields.get("deepstack_encoder_layer_indexes")
        layers = default if listed is None else len(listed)
        injected = getattr(config, "deepstack_num_inject_layers", None)
        levels |= {1, 1 + (layers if injected is None else min(layers, int(injected)))}
    return levels
