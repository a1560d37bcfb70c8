# SPDX-License-Identifier: Apache-2.0
"""Pictures whose embedding is known, requests that hold them, and the model that takes them.

The types are vLLM's own. A picture's embedding follows from its seed, so a loaded embedding can
be compared with the expected one bit for bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from lab.conformance.violations import Effect, Violation, require
from lab.vllm_loop import Model

# Qwen2-VL merges 2 x 2 patches into one embedding.
_PATCHES_AN_EMBEDDING = 4
_FIELD = MultiModalSharedField(batch_size=1)
_TOKEN = 5
_NUM_LAST_WORDS = 16
_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


@dataclass(frozen=True)
class Picture:
    """One media item. Equal seeds are equal contents; the identifier is the client's choice."""

    seed: int
    identifier: str
    num_embeds: int = 16
    has_pixels: bool = True
    modality: str = "image"
    is_strided: bool = False
    """Whether the encoder returns a tensor that is not contiguous."""

    def without_pixels(self) -> "Picture":
        """Return the item as a router forwards it: the encoder's metadata, nothing to encode."""
        return replace(self, has_pixels=False)

    def feature(self, offset: int) -> MultiModalFeatureSpec:
        """Return the item in vLLM's form, at token `offset` of a prompt."""
        grid = torch.tensor([1, 2, 2 * self.num_embeds])
        fields = {_GRIDS[self.modality]: MultiModalFieldElem(data=grid, field=_FIELD)}
        if self.has_pixels:
            pixels = torch.full((_PATCHES_AN_EMBEDDING * self.num_embeds, 8), float(self.seed))
            pixels[0, 1] = self.is_strided
            fields[_PIXELS[self.modality]] = MultiModalFieldElem(data=pixels, field=_FIELD)
        return MultiModalFeatureSpec(
            data=MultiModalKwargsItem(fields),
            modality=self.modality,
            identifier=self.identifier,
            mm_position=PlaceholderRange(offset=offset, length=self.num_embeds),
        )


def picture(seed: int, identifier: str | None = None, num_embeds: int = 16) -> Picture:
    """Return a picture; its identifier follows from the seed unless given."""
    return Picture(seed, f"picture-{seed}" if identifier is None else identifier, num_embeds)


def embedding(seed: int, num_embeds: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return the embedding of a picture: [num_embeds, width]."""
    generator = torch.Generator().manual_seed(seed * 1000 + num_embeds)
    return torch.randn(num_embeds, width, generator=generator).to(dtype)


class PictureModel(Model):
    """Encodes pictures, and checks the embeddings that it is given."""

    def __init__(
        self,
        config: ModelConfig,
        rank: int,
        expected: Callable[[str, MultiModalFeatureSpec], Tensor],
    ) -> None:
        """`expected`: returns the embedding that an item of a request must have."""
        super().__init__()
        self._config = config
        self._rank = rank
        self._expected = expected

    def encode(self, feature: MultiModalFeatureSpec) -> Tensor:
        """Play the encoder.

        Raises:
            Violation: the item has no pixels.
        """
        assert feature.data is not None
        pixels = feature.data.get_data().get(_PIXELS[feature.modality])
        if pixels is None:
            message = f"item {feature.identifier[:40]!r} must be encoded and has no pixels"
            raise Violation(Effect.ENGINE_DIES, message)
        assert isinstance(pixels, Tensor)
        num_embeds, width = feature.mm_position.get_num_embeds(), self._config.get_hidden_size()
        assert isinstance(self._config.dtype, torch.dtype)
        made = embedding(int(pixels[0, 0]), num_embeds, width, self._config.dtype)
        return made.T.contiguous().T if pixels[0, 1] else made

    def gather(self, output: SchedulerOutput) -> None:
        """Compare the embeddings that this step's tokens need, as `_gather_mm_embeddings` does."""
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            row = self.rows[request_id]
            start = row.num_computed_tokens
            for feature in row.features:
                position = feature.mm_position
                end = position.offset + position.length
                if position.offset < start + num_tokens and end > start:
                    self._compare(request_id, feature)

    def _compare(self, request_id: str, feature: MultiModalFeatureSpec) -> None:
        found = self.encoder_cache.get(feature.identifier)
        name = f"item {feature.identifier[:40]!r} on rank {self._rank}"
        if found is None:
            message = f"encoder cache miss: {name} was neither loaded nor encoded"
            raise Violation(Effect.ENGINE_DIES, message)
        wanted = self._expected(request_id, feature)
        facts = [(tuple(each.shape), each.dtype) for each in (found, wanted)]
        require(
            facts[0] == facts[1], Effect.WRONG_ROWS, f"{name} is {facts[0]}, expected {facts[1]}"
        )
        require(
            torch.equal(found, wanted),
            Effect.WRONG_ROWS,
            f"{name} has other values than were saved",
        )


def request_for(
    request_id: str, pictures: Sequence[Picture], *, max_tokens: int, params: Any, hasher: Any
) -> Request:
    """Return a request: two words, each picture with a word behind it, and a few words more."""
    features, offset = [], 2
    for each in pictures:
        features.append(each.feature(offset))
        offset += each.num_embeds + 1
    extra = None if params is None else {"ec_transfer_params": params}
    return Request(
        request_id=request_id,
        prompt_token_ids=[_TOKEN] * (offset + _NUM_LAST_WORDS),
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra),
        pooling_params=None,
        mm_features=features,
        block_hasher=hasher,
    )
