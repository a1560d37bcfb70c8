# SPDX-License-Identifier: Apache-2.0
"""The metadata of media items that a producer publishes, so that a consumer needs no pixels."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)

from ecshare.store.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import ModelConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec

_MAX_RECORDED = 10_000
# Models of the Qwen2.5-VL and Omni families compute token positions from these fields, which vLLM
# does not publish. If a field is absent they assume this value. With any other value a consumer
# without the video would use wrong positions. Processors may add the fields to items without video.
_ASSUMED_VALUES = {"second_per_grid_ts": 1.0, "use_audio_in_video": 0.0}


class Placeholders:
    """Holds the placeholder metadata of media items. Ownership: vLLM's scheduler thread."""

    def __init__(self, model_config: "ModelConfig") -> None:
        """Prepare to ask vLLM which fields the model needs, once for each modality."""
        self._resolver = PlaceholderMetadataResolver(model_config)
        self._recorded: Recent[str, dict[str, Any]] = Recent(_MAX_RECORDED)

    def can_encode(self, feature: "MultiModalFeatureSpec") -> bool:
        """Return whether the item contains pixels or sound, not only placeholder metadata."""
        if feature.data is None:
            return False
        fields = self._resolver.fields_for(feature.modality)
        # Called twice for every item of every request. Iterating over the UserDict itself is ten
        # times slower than over its dict.
        for name, element in feature.data.data.items():
            if element.data is not None and name not in fields and name not in _ASSUMED_VALUES:
                return True
        return False

    def metadata(self, feature: "MultiModalFeatureSpec") -> dict[str, Any]:
        """Return the metadata with which a consumer sizes the item's placeholder, and record it.

        Empty: a consumer needs the media itself. It is recorded because vLLM omits `feature.data`
        of an item that a later process has cached.
        """
        (entry,) = collect_ec_item_metadata([feature], self._resolver).values()
        metadata = self._corrected(feature, entry["metadata"])
        self._recorded[feature.identifier] = metadata
        return metadata

    def announcement(self, features: "Sequence[MultiModalFeatureSpec]") -> dict[str, Any]:
        """Return a request's `ec_transfer_params` for vLLM: the modality and the metadata of each
        item, by identifier.
        """
        entries: dict[str, Any] = collect_ec_item_metadata(list(features), self._resolver)
        for feature in features:
            entry = entries[feature.identifier]
            entry["modality"] = feature.modality  # vLLM does so itself since 0.33
            entry["metadata"] = self._corrected(feature, entry["metadata"])
        return entries

    def _corrected(
        self, feature: "MultiModalFeatureSpec", collected: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the metadata that vLLM has `collected`, corrected where vLLM lacks or omits
        fields.
        """
        if self._gives_wrong_positions(feature):
            return {}
        return collected or self._recorded.get(feature.identifier, {})

    def _gives_wrong_positions(self, feature: "MultiModalFeatureSpec") -> bool:
        """Return whether the metadata would give a consumer wrong token positions for the item."""
        if feature.data is None:
            return False
        published = self._resolver.fields_for(feature.modality)
        values = feature.data.get_data()
        return any(
            name in values
            and name not in published
            and not torch.all(torch.as_tensor(values[name]) == assumed)
            for name, assumed in _ASSUMED_VALUES.items()
        )
