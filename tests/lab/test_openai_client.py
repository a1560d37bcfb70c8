# SPDX-License-Identifier: Apache-2.0
"""The client reads counters, and makes images, videos and sounds for the demo and the tests."""

import base64
import io
from pathlib import Path

import cv2
import numpy as np
import pytest
import soundfile
from PIL import Image

from lab.servers.openai_client import picture, question, read_counters, sound, video

PAGE = """\
# HELP ecshare_items_total Media items, by outcome.
# TYPE ecshare_items_total counter
ecshare_items_total{engine="0",event="encoded",model_name="a \\"b\\", {c}"} 2.0
ecshare_items_total{engine="1",event="encoded",model_name="m"} 3.0
ecshare_items_total{engine="0",event="loaded",model_name="m"} 1.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 1.2e+01
process_open_fds 21.0
ecshare_misses_total{engine="0",reason="late"} 4.0
"""


def test_counters_are_summed_over_engines_by_event_or_reason() -> None:
    assert read_counters(PAGE) == {
        ("ecshare_items_total", "encoded"): 5,
        ("ecshare_items_total", "loaded"): 1,
        ("vllm:prompt_tokens_by_source_total", "local_compute"): 12,
        ("process_open_fds", ""): 21,
        ("ecshare_misses_total", "late"): 4,
    }


def test_images_differ_by_seed_and_are_reproducible() -> None:
    assert len({picture(seed) for seed in range(20)}) == 20
    assert picture(3) == picture(3)


def test_videos_and_sounds_differ_by_seed_and_are_reproducible() -> None:
    assert len({video(seed) for seed in range(20)}) == 20
    assert len({sound(seed) for seed in range(20)}) == 20
    assert (video(3), sound(3)) == (video(3), sound(3))


def test_video_has_the_requested_frames_and_speed(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    url = video(1, frames_per_s=3, frames=5, size=56)
    path.write_bytes(base64.b64decode(url.partition("base64,")[2]))
    film = cv2.VideoCapture(str(path))
    assert film.get(cv2.CAP_PROP_FPS) == 3
    shown = [film.read()[1] for _ in range(5)]
    assert not film.read()[0]
    assert {each.shape for each in shown} == {(56, 56, 3)}
    drawn = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture(1, 56).partition(",")[2]))))
    assert abs(shown[0][:, :, ::-1].astype(int) - drawn).mean() < 10, "colours are lost"


def test_sound_has_the_requested_length() -> None:
    wav = base64.b64decode(sound(1, seconds=0.5).partition("base64,")[2])
    samples, rate = soundfile.read(io.BytesIO(wav))
    assert len(samples) == rate / 2
    assert 0.3 < max(samples) < 0.4


@pytest.mark.parametrize("size", [56, 448])
def test_image_has_the_requested_size(size: int) -> None:
    png = base64.b64decode(picture(1, size).partition(",")[2])
    assert Image.open(io.BytesIO(png)).size == (size, size)


def test_question_requests_greedy_token_ids() -> None:
    body = question("What?", ["data:a", "data:b"], max_tokens=3)
    assert [part["type"] for part in body["messages"][0]["content"]] == [
        *("image_url", "image_url", "text")
    ]
    assert (body["temperature"], body["return_token_ids"], body["max_tokens"]) == (0, True, 3)
