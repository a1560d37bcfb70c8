# SPDX-License-Identifier: Apache-2.0
"""transformers loads the small models, and their answers depend on the input."""

import base64
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoProcessor

from lab import model_cache
from lab.models import FAMILIES
from lab.servers import openai_client as client
from tests.conftest import CACHE
from tests.engines import test_families_stages
from tests.nightly import gate_tries_only

# One of each kind; the gate's engine tests use others, too.
GATE = ("qwen2", "qwen2-audio", "qwen2.5-vl")
NOT_IN_TRANSFORMERS = {
    *("kimi-vl", "minicpmv"),
    *("qwen2.5-omni", "qwen3-omni"),  # not the thinker alone
    "audio-flamingo3",  # not by an automatic class
    "llama4",  # its processor gives bfloat16
}
"""Families that only vLLM runs; tests/engines has tests of all."""
families = pytest.mark.parametrize("family", gate_tries_only(GATE, sorted(FAMILIES)))


@families
def test_same_seed_makes_the_same_model_files(family: str, tmp_path: Path) -> None:
    kept = contents(model_cache.model(CACHE / "models", family))
    assert contents(FAMILIES[family](tmp_path / "again", 0)) == kept
    other = contents(FAMILIES[family](tmp_path / "other", 1))
    assert other.keys() == kept.keys()
    assert {name for name in kept if kept[name] != other[name]} == {"model.safetensors"}
    with pytest.raises(FileExistsError):
        FAMILIES[family](tmp_path / "again", 0)


@pytest.mark.parametrize("family", gate_tries_only(["qwen2"], sorted(FAMILIES)))
def test_another_process_makes_the_same_model_files(family: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lab.models", family]
    subprocess.run([*command, str(tmp_path / "again")], check=True)
    kept = model_cache.model(CACHE / "models", family)
    assert contents(tmp_path / "again") == contents(kept)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "family", gate_tries_only(GATE, sorted(FAMILIES.keys() - NOT_IN_TRANSFORMERS))
)
def test_answer_of_transformers_depends_on_the_media(family: str) -> None:
    answers = Answers(model_cache.model(CACHE / "models", family))
    show = SHOW.get(family, Answers.picture).__get__(answers)
    told = [show("What is this?", seed) for seed in (1, 2, 3)]
    assert len({*told, show("Why?", 1)}) == 4
    assert show("What is this?", 1) == told[0]


def test_every_family_with_media_is_tried_in_stages() -> None:
    assert test_families_stages.FAMILIES.keys() == FAMILIES.keys() - set(TEXT_ONLY)


class Answers:
    """A model in this process, with greedy decoding."""

    def __init__(self, path: Path) -> None:
        is_text = "text_config" not in json.loads((path / "config.json").read_text())
        auto = AutoModelForCausalLM if is_text else AutoModelForMultimodalLM
        self.model = auto.from_pretrained(path)
        self.processor = AutoProcessor.from_pretrained(path)

    def picture(self, words: str, seed: int) -> tuple[int, ...]:
        image = Image.open(io.BytesIO(payload(client.picture(seed, size=224))))
        return self.answer(words, "image", images=[image])

    def sound(self, words: str, seed: int) -> tuple[int, ...]:
        samples, rate = soundfile.read(io.BytesIO(payload(client.sound(seed))))
        return self.answer(words, "audio", audio=[samples.astype(np.float32)], sampling_rate=rate)

    def text(self, words: str, seed: int) -> tuple[int, ...]:
        return self.answer(f"{seed} {words}")

    def answer(self, words: str, modality: str = "", **media: Any) -> tuple[int, ...]:
        shown = [{"type": modality}] if modality else []
        content = [*shown, {"type": "text", "text": words}]
        prompt = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        inputs = self.processor(text=[prompt], return_tensors="pt", **media)
        with torch.no_grad():
            tokens = self.model.generate(**inputs, max_new_tokens=12)
        return tuple(tokens[0, inputs["input_ids"].shape[1] :].tolist())


def payload(url: str) -> bytes:
    return base64.b64decode(url.partition("base64,")[2])


TEXT_ONLY = ("qwen2", "gemma3", "deepseek-v2", "lfm2", "qwen3.5-text")
HEARING = ("audio-flamingo3", "qwen2-audio")
SHOW = {
    **dict.fromkeys(TEXT_ONLY, Answers.text),
    **dict.fromkeys(HEARING, Answers.sound),
}
