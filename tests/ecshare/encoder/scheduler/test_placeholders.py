# SPDX-License-Identifier: Apache-2.0
"""Announced metadata of an item is sufficient for the right placeholder tokens, or empty."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import ModelConfig
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)

from ecshare.encoder.scheduler.placeholders import Placeholders

GRID: dict[str, Any] = {"video_grid_thw": torch.tensor([2, 8, 8])}


@pytest.fixture(scope="module")
def model_config(vlm: Path) -> ModelConfig:
    return ModelConfig(str(vlm), dtype="float32")


@pytest.fixture
def placeholders(model_config: ModelConfig) -> Placeholders:
    return Placeholders(model_config)


def video(identifier: str = "film", **values: Any) -> MultiModalFeatureSpec:
    field = MultiModalSharedField(batch_size=1)
    elements = {name: MultiModalFieldElem(data=data, field=field) for name, data in values.items()}
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem(elements) if elements else None,
        modality="video",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=2, length=32),
    )


@pytest.mark.parametrize(
    ("values", "is_enough"),
    [
        ({}, True),
        ({"second_per_grid_ts": torch.tensor(1.0)}, True),
        ({"second_per_grid_ts": torch.tensor(2.0)}, False),
        ({"second_per_grid_ts": 0.5}, False),
        ({"use_audio_in_video": torch.tensor(False)}, True),
        ({"use_audio_in_video": torch.tensor(True)}, False),
    ],
)
def test_video_with_nondefault_timing_is_announced_without_metadata(
    placeholders: Placeholders, values: dict[str, Any], is_enough: bool
) -> None:
    film = video(**GRID, **values)
    expected = {"video_grid_thw": [2, 8, 8]} if is_enough else {}
    assert placeholders.metadata(film) == expected
    for told in (film, video()):  # vLLM omits data that a later process has cached
        announced = placeholders.announcement([told])
        assert announced["film"]["metadata"] == expected
        assert announced["film"]["modality"] == "video"


def test_latest_metadata_of_an_identifier_is_remembered(placeholders: Placeholders) -> None:
    placeholders.metadata(video(**GRID))
    assert placeholders.metadata(video("other")) == {}
    placeholders.metadata(video(video_grid_thw=torch.tensor([4, 8, 8])))
    assert placeholders.metadata(video()) == {"video_grid_thw": [4, 8, 8]}


def test_item_can_be_encoded_only_with_pixels(placeholders: Placeholders) -> None:
    assert placeholders.can_encode(video(**GRID, pixel_values_videos=torch.zeros(1, 8)))
    assert not placeholders.can_encode(video(**GRID))
    assert not placeholders.can_encode(video(**GRID, use_audio_in_video=torch.tensor(False)))
    assert not placeholders.can_encode(video())
