# SPDX-License-Identifier: Apache-2.0
"""What is announced of an item is enough for the right tokens, or it is nothing."""

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
def test_a_video_whose_times_a_consumer_would_not_know_is_announced_without_metadata(
    placeholders: Placeholders, values: dict[str, Any], is_enough: bool
) -> None:
    film = video(**GRID, **values)
    expected = {"video_grid_thw": [2, 8, 8]} if is_enough else {}
    assert placeholders.metadata(film) == expected
    for told in (film, video()):  # vLLM leaves out what a later process has cached
        announced = placeholders.announcement([told])
        assert announced["film"]["metadata"] == expected
        assert announced["film"]["modality"] == "video"


def test_what_is_remembered_is_the_latest_and_its_own(placeholders: Placeholders) -> None:
    placeholders.metadata(video(**GRID))
    assert placeholders.metadata(video("other")) == {}
    placeholders.metadata(video(video_grid_thw=torch.tensor([4, 8, 8])))
    assert placeholders.metadata(video()) == {"video_grid_thw": [4, 8, 8]}


def test_items_come_with_pixels_or_without(placeholders: Placeholders) -> None:
    assert placeholders.can_encode(video(**GRID, pixel_values_videos=torch.zeros(1, 8)))
    assert not placeholders.can_encode(video(**GRID))
    assert not placeholders.can_encode(video(**GRID, use_audio_in_video=torch.tensor(False)))
    assert not placeholders.can_encode(video())
