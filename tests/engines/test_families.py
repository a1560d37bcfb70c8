# SPDX-License-Identifier: Apache-2.0
"""Model families whose embeddings, and the metadata that a consumer needs, differ."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from lab import model_cache
from lab.servers.engine_forks import EngineForks
from lab.servers.engines import EngineProcess, ec_argument
from tests.conftest import CACHE, LOGS, engines
from tests.engines.chat import (
    Answer,
    announced,
    ask,
    counting,
    passed_on,
    picture,
    sound,
    text,
    video,
)
from tests.releases import needs_encoder_metrics

pytestmark = [pytest.mark.engine, pytest.mark.models, needs_encoder_metrics]

QUESTION = text("what is to be seen or heard here?")
ENCODED, LOADED = "ecshare_items/encoded", "ecshare_items/loaded"
SHOW = {"image": picture, "video": video, "audio": sound}
LIMITS = {
    "qwen3-vl": '{"image": 2, "video": 2}',
    "llava": '{"image": 2}',
    "qwen2-audio": '{"audio": 2}',
}
WIDTHS = {"qwen3-vl": 3 * 128, "llava": 128, "qwen2-audio": 128}
"""The width of an embedding; the language models are 128 wide."""
TOLD = {
    ("qwen3-vl", "image"): {"image_grid_thw"},
    ("qwen3-vl", "video"): {"video_grid_thw", "timestamps"},
    ("llava", "image"): set[str](),
    ("qwen2-audio", "audio"): {"audio_num_tokens"},
}
"""The metadata that an encoder reports, and that replaces the media for a consumer."""


class Fleet(NamedTuple):
    family: str
    plain: EngineProcess
    encoder: EngineProcess
    consumer: EngineProcess
    store: Path

    def encode(self, *content: dict[str, Any]) -> Answer:
        """Have two items encoded and stored."""
        before = self.stored()
        with counting(self.encoder) as gained:
            encoded = ask(self.encoder, self.encoder.model, list(content))
        assert gained[ENCODED] == 2
        added = self.stored() - before
        tensors = [load_file(path)["tensor"] for path in added]
        assert [tensor.shape[1] for tensor in tensors] == [WIDTHS[self.family]] * 2
        return encoded

    def load(self, encoded: Answer, *content: dict[str, Any]) -> list[int]:
        """Ask the consumer, which must load two items and encode none."""
        params = passed_on(encoded)
        with counting(self.consumer) as gained:
            answer = ask(self.consumer, self.consumer.model, [*content, QUESTION], **params)
        assert (gained[LOADED], gained[ENCODED]) == (2, 0)
        return answer.tokens

    def expected(self, *content: dict[str, Any]) -> list[int]:
        return ask(self.plain, self.plain.model, [*content, QUESTION]).tokens

    def stored(self) -> set[Path]:
        return {path for path in (self.store / "ec").rglob("*") if len(path.name) == 64}


@pytest.fixture(scope="module")
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: EngineForks
) -> Iterator[Fleet]:
    """The engines of one family; they end before those of the next one start."""
    family: str = request.param
    root, logs = tmp_path_factory.mktemp(family), LOGS / f"{__name__}.{family}"
    url, limits = str(root / "store"), f"--limit-mm-per-prompt={LIMITS[family]}"
    options = {"host_cache_dir": str(root / "host"), "wait_s": 20, "save": "durable"}
    with engines(logs, model_cache.model(CACHE / "models", family), forks) as start:
        fleet = (
            start("plain", limits),
            start("encoder", limits, ec_argument("producer", url, **options)),
            start("consumer", limits, ec_argument("consumer", url, **options)),
        )
        for engine in fleet:
            engine.wait_ready()
        yield Fleet(family, *fleet, root / "store")


CASES = [
    (family, modality, is_whole)
    for (family, modality), told in TOLD.items()
    for is_whole in ((True, False) if told else (True,))
]


# The scope makes the cases of a family share its engines.
@pytest.mark.parametrize(
    ("fleet", "modality", "is_whole"),
    [
        pytest.param(
            *(family, modality, is_whole),
            id=f"{family}-{modality}-{'whole' if is_whole else 'told'}",
        )
        for family, modality, is_whole in CASES
    ],
    indirect=["fleet"],
    scope="module",
)
def test_consumer_loads_items_sent_with_or_without_pixels(
    fleet: Fleet, modality: str, is_whole: bool
) -> None:
    show, seeds = SHOW[modality], (1, 2) if is_whole else (3, 4)
    shown = [show(seed, f"{modality} {seed}") for seed in seeds]
    encoded = fleet.encode(*shown)
    for entry in encoded.body["ec_transfer_params"].values():
        assert set(entry["metadata"]) == TOLD[fleet.family, modality]
    sent = shown
    if not is_whole:
        sent = [announced(encoded, f"{modality} {seed}", modality) for seed in seeds]
    tokens = fleet.load(encoded, *sent)
    assert tokens == fleet.expected(*shown)
    assert tokens != fleet.expected(*reversed(shown))
