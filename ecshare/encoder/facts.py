# SPDX-License-Identifier: Apache-2.0
"""The facts in which engines must agree to share embeddings, and other facts of this engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from msgspec import Struct

from ecshare.plugin.compat import max_steps_in_flight, names_media_by_request, option
from ecshare.plugin.deployment import deployment_refusal, has_remote_workers
from ecshare.plugin.model_facts import Namespace, has_tower_adapters, media_facts, model_facts
from ecshare.store.format import ITEM_BYTES, PROLOGUE_BYTES, TensorSpec
from ecshare.store.keys import Key, Kind
from ecshare.transfer.device.staging import dtype_name

# With video pruning vLLM appends token positions to the embeddings of videos and pictures alike:
# Qwen2.5-VL four columns, Qwen3-VL five, other models none.
_POSITION_COLUMNS = (0, 4, 5)


class Embeddings(Struct, frozen=True):
    """The embeddings of `namespace`: tensors with one of `widths` and `dtypes`."""

    namespace: Namespace
    widths: frozenset[int]
    """In columns; more than one where modalities or models of one kind of options differ."""
    dtypes: frozenset[str]
    """Safetensors names."""

    def key(self, identifier: str, num_embeds: int, adapter: str) -> Key:
        """Return the key of an item's object; `adapter`: fingerprint of its LoRA adapter, or "".

        The number of embeddings is part of the name: an object of another length, left under the
        same client-chosen identifier, must neither be loaded nor block the right one. A fingerprint
        holds no colon, so no identifier can pretend to have one.
        """
        return self.namespace.key(f"{num_embeds}:{adapter}:{identifier}")

    def fits(self, spec: TensorSpec, num_embeds: int) -> bool:
        """Return whether a stored tensor may be the embedding of an item with `num_embeds` rows."""
        is_of_shape = spec.shape in {(num_embeds, width) for width in self.widths}
        return is_of_shape and spec.dtype in self.dtypes

    def max_bytes(self, num_embeds: int) -> int:
        """Return the size of the largest object that can hold such a tensor."""
        item_bytes = max(ITEM_BYTES[dtype] for dtype in self.dtypes)
        return PROLOGUE_BYTES + num_embeds * max(self.widths) * item_bytes


class Role(NamedTuple):
    """The use that an engine makes of embeddings: "ec_both" saves and loads them."""

    is_producer: bool
    is_consumer: bool

    @property
    def only_encodes(self) -> bool:
        """Return whether it saves but never loads. vLLM drops reports of such engines' workers."""
        return self.is_producer and not self.is_consumer


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """The facts of its engine that the scheduler half needs."""

    role: Role
    embeddings: Embeddings
    is_shareable: bool = True
    """False: it neither saves nor loads."""
    numbers_media: bool = False
    """True if vLLM names media by numbers. Such media are not shared."""
    has_tower_adapters: bool = False
    """True if LoRA adapters of requests change embeddings."""
    has_remote_workers: bool = False
    """True if workers may be on other hosts than the scheduler."""
    max_steps_in_flight: int | None = 1
    """See `IdleSteps`."""


def role_of(vllm_config: Any) -> Role:
    """Return the role of this engine, from vLLM's `ec_role`."""
    ec_config = vllm_config.ec_transfer_config
    assert ec_config is not None  # or vLLM would not have made the connector
    return Role(ec_config.is_ec_producer, ec_config.is_ec_consumer)


def encoder_facts(
    vllm_config: Any, role: Role, namespace: Namespace, *, is_shareable: bool
) -> EncoderFacts:
    """Return the facts of this engine, whose embeddings are those of `namespace`."""
    dtype = vllm_config.model_config.dtype
    assert isinstance(dtype, torch.dtype)  # a word only until vLLM has read the model
    # Some encoders run in float32, independently of the model's dtype.
    dtypes = frozenset((dtype_name(dtype), "F32"))
    return EncoderFacts(
        role,
        Embeddings(namespace, encoder_widths(vllm_config), dtypes),
        is_shareable,
        names_media_by_request(vllm_config),
        has_tower_adapters(vllm_config),
        has_remote_workers(vllm_config),
        max_steps_in_flight(vllm_config),
    )


def refusal(vllm_config: Any) -> str | None:
    """Return why an engine with `vllm_config` cannot share embeddings; None if it can."""
    if vllm_config.model_config.is_encoder_decoder:
        # vLLM asks for the items of such models too, but never loads them.
        return "encoder-decoder models are not supported"
    return deployment_refusal(vllm_config)


def encoder_namespace(vllm_config: Any, epoch: str, integrity: str = "") -> Namespace:
    """Return the namespace of this engine's embeddings.

    `epoch` is the user's own text, changed when weights change in place. `integrity` is the
    name of the key that authenticates objects.
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
    """Return how many features, each as wide as the text model, an embedding may concatenate."""
    # Granite 4 Vision: only injected features, each for a layer of its own.
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
