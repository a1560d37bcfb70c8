# SPDX-License-Identifier: Apache-2.0
"""The facts that give engines different namespaces, from vLLM's own configuration objects."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from ecshare.encoder.facts import encoder_namespace, encoder_widths
from kvshare.chunks.facts import kv_namespace


def configure(model: Path, **changes: Any) -> VllmConfig:
    arguments: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, **changes}
    return EngineArgs(model=str(model), **arguments).create_engine_config()


@pytest.fixture(scope="module")
def base(vlm: Path) -> VllmConfig:
    return configure(vlm)


def encoder(config: VllmConfig, epoch: str = "") -> str:
    return encoder_namespace(config, epoch).digest


def kv(config: VllmConfig, epoch: str = "") -> str:
    return kv_namespace(config, epoch).digest


both = pytest.mark.parametrize("namespace", [encoder, kv])
Digest = Callable[..., str]


@both
def test_equal_engines_share_a_namespace(vlm: Path, base: VllmConfig, namespace: Digest) -> None:
    assert namespace(configure(vlm)) == namespace(base)


def test_embeddings_and_kv_have_separate_namespaces(base: VllmConfig) -> None:
    assert encoder(base) != kv(base)


@both
@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"mm_processor_kwargs": {"max_pixels": 50_000}},
        {"media_io_kwargs": {"video": {"num_frames": 3}}},
        {"hf_overrides": {"rope_theta": 5.0}},
        {"video_pruning_rate": 0.5},
    ],
)
def test_options_that_change_bytes_change_the_namespace(
    vlm: Path, base: VllmConfig, namespace: Digest, changes: dict[str, Any]
) -> None:
    assert namespace(configure(vlm, **changes)) != namespace(base)


@both
def test_epoch_changes_the_namespace(base: VllmConfig, namespace: Digest) -> None:
    assert namespace(base, "after-the-update") != namespace(base)


def test_fp8_kv_has_its_own_namespace(base: VllmConfig) -> None:
    assert kv_namespace(base, "", stored_dtype="fp8").digest != kv(base)
    assert kv_namespace(base, "", stored_dtype="auto").digest == kv(base)


def test_compressed_kv_has_its_own_namespace(base: VllmConfig) -> None:
    assert kv_namespace(base, "", compression="zstd").digest != kv(base)
    assert kv_namespace(base, "", compression="none").digest == kv(base)


@both
def test_video_pruning_method_changes_the_namespace(vlm: Path, namespace: Digest) -> None:
    config = configure(vlm, video_pruning_rate=0.5)
    before = namespace(config)
    config.model_config.multimodal_config.video_pruning_method = "another"  # type: ignore
    assert namespace(config) != before


@both
def test_location_of_unreadable_weights_changes_the_namespace(
    vlm: Path, tmp_path: Path, namespace: Digest
) -> None:
    shutil.copytree(vlm, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    config = configure(tmp_path / "model")
    nowhere = namespace(config)
    config.load_config.model_loader_extra_config = {"tensorizer_uri": "s3://bucket/one"}
    one = namespace(config)
    config.load_config.model_loader_extra_config = {"tensorizer_uri": "s3://bucket/two"}
    assert len({nowhere, one, namespace(config)}) == 3
    config.model_config.model_weights = "s3://bucket/three"
    assert namespace(config) not in (nowhere, one)


@both
def test_media_processing_device_keeps_the_namespace(
    vlm: Path, base: VllmConfig, namespace: Digest
) -> None:
    """vLLM sets these options itself, and only for encode engines."""
    config = configure(vlm)
    multimodal = config.model_config.multimodal_config
    assert multimodal is not None
    multimodal.mm_processor_kwargs = {"device": "cuda"}
    multimodal.media_io_kwargs = {"video": {"device": "cuda", "backend": "torchcodec"}}
    assert namespace(config) == namespace(base)
    multimodal.media_io_kwargs = {"video": {"backend": "another"}}
    assert namespace(config) != namespace(base)


@both
def test_fp8_encoder_scales_count_by_content(
    vlm: Path, base: VllmConfig, tmp_path: Path, namespace: Digest
) -> None:
    config = configure(vlm)
    found = [namespace(base)]
    for name, content in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).write_text(content)
        path = str(tmp_path / name)
        config.model_config.multimodal_config.mm_encoder_fp8_scale_path = path  # type: ignore
        found.append(namespace(config))
    assert found[1] == found[2]
    assert len({*found}) == 3


@both
def test_another_configuration_file_changes_the_namespace(
    vlm: Path, base: VllmConfig, tmp_path: Path, namespace: Digest
) -> None:
    shutil.copy(vlm / "config.json", tmp_path)
    assert namespace(configure(vlm, hf_config_path=str(tmp_path))) != namespace(base)


@pytest.mark.parametrize("is_nested", [False, True])
def test_longrope_factors_change_the_kv_namespace(vlm: Path, is_nested: bool) -> None:
    def digest(max_model_len: int) -> str:
        config = configure(vlm, max_model_len=max_model_len)
        factors = {"short_factor": [1.0], "long_factor": [2.0]}
        rope = {"rope_type": "longrope", "original_max_position_embeddings": 1000, **factors}
        config.model_config.hf_text_config.rope_parameters = {"full": rope} if is_nested else rope
        return kv(config)

    assert digest(500) == digest(1000) != digest(1001) == digest(2000)


def test_max_model_len_keeps_the_kv_namespace_without_longrope(vlm: Path, base: VllmConfig) -> None:
    assert kv(configure(vlm, max_model_len=500)) == kv(base)


@pytest.mark.parametrize("said", [None, True])
def test_llama_4_kv_depends_on_max_model_len(
    vlm: Path, monkeypatch: pytest.MonkeyPatch, said: bool | None
) -> None:
    def digest(max_model_len: int) -> str:
        model = config.model_config
        model.max_model_len = max_model_len
        return kv(config)

    config = configure(vlm)
    monkeypatch.setattr(ModelConfig, "architectures", ["Llama4ForConditionalGeneration"])
    if said is not None:
        config.model_config.override_generation_config = {"attn_temperature_tuning": said}
    assert (digest(32768) == digest(40000)) == (said is not None)


def test_draft_model_changes_the_kv_namespace(vlm: Path, other_vlm: Path) -> None:
    """A draft model's KV is in the same blocks. Speculation without a model has none."""

    def digest(**guesses: Any) -> str:
        return kv(configure(vlm, speculative_config={"num_speculative_tokens": 2, **guesses}))

    plain = kv(configure(vlm))
    assert digest(method="ngram", prompt_lookup_max=3) == plain
    config = configure(vlm)
    draft = SimpleNamespace(model=str(other_vlm), revision=None, seed=0)
    config.speculative_config = SimpleNamespace(draft_model_config=draft)  # type: ignore
    assert kv(config) != plain


def test_layers_skipped_by_fp8_change_the_kv_namespace(vlm: Path) -> None:
    """Shapes are equal but bytes are not: one layer of each engine is not in 8 bits."""

    def digest(*layers: str) -> str:
        own = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": list(layers)}
        return kv(configure(vlm, **own))

    assert digest("0") == digest("0")
    assert len({digest(), digest("0"), digest("1")}) == 3


def test_block_size_changes_only_the_kv_namespace(vlm: Path, base: VllmConfig) -> None:
    other = configure(vlm, block_size=32)
    assert kv(other) != kv(base)
    assert encoder(other) == encoder(base)


def test_vllm_releases_share_kv_only_if_known_to_be_equal(
    base: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings are plain tensors in every release."""

    def digests(*releases: str) -> set[str]:
        found = set()
        for release in releases:
            monkeypatch.setattr("vllm.__version__", release)
            found.add(kv(base))
        return found

    compared = ("0.30.0", "0.30.3", "0.31.0", "0.32.0", "0.32.1+cpu")
    others = ("0.29.0", "0.32.1.dev7+g1234567", "0.32.0rc1", "0.99.0", "0.99.1", "1.32.0", "dev")
    expected = {encoder(base)}
    assert len(digests(*compared)) == 1
    assert len(digests(*others, *compared)) == len(others) + 1
    assert {encoder(base)} == expected


@both
def test_other_weights_of_the_same_name_change_the_namespace(
    vlm: Path, other_vlm: Path, tmp_path: Path, namespace: Digest
) -> None:
    digests = set()
    for number, weights in enumerate((vlm, other_vlm)):
        # Simulates two hosts with the same --model path and other files.
        path = tmp_path / "model"
        path.symlink_to(weights)
        config = configure(path)
        config.load_config.download_dir = str(number)  # avoids the cached fingerprint
        digests.add(namespace(config))
        path.unlink()
    assert len(digests) == 2


def test_missing_weight_files_fall_back_to_the_name_with_a_warning(
    vlm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(vlm, tmp_path / "model")
    config = configure(tmp_path / "model")
    shutil.rmtree(tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        digest = encoder(config)
    assert "epoch" in caplog.text
    assert encoder(config, "other") != digest


def widths(hf_config: SimpleNamespace, **multimodal: Any) -> frozenset[int]:
    """Return the widths for a model whose text has width 32; `multimodal`: the engine's options."""
    model = SimpleNamespace(
        get_inputs_embeds_size=lambda: 32,
        hf_config=hf_config,
        multimodal_config=SimpleNamespace(**multimodal),
    )
    return encoder_widths(SimpleNamespace(model_config=model))


DEEPSTACK = SimpleNamespace(deepstack_visual_indexes=[8, 16, 24])
PLAIN = SimpleNamespace()


def test_plain_encoder_has_only_the_text_width(base: VllmConfig) -> None:
    assert encoder_widths(base) == {base.model_config.get_hidden_size()}
    assert widths(SimpleNamespace(vision_config=PLAIN)) == {32}


def test_deepstack_encoder_is_wider() -> None:
    assert widths(SimpleNamespace(vision_config=DEEPSTACK)) == {4 * 32}
    assert widths(SimpleNamespace(vision_config=DEEPSTACK), video_pruning_rate=0.0) == {4 * 32}


def test_audio_beside_a_deepstack_encoder_has_the_text_width() -> None:
    """In Qwen3-Omni the encoders belong to the thinker."""
    thinker = SimpleNamespace(vision_config=DEEPSTACK, audio_config=PLAIN)
    assert widths(SimpleNamespace(thinker_config=thinker)) == {32, 4 * 32}


def test_video_pruning_adds_position_columns() -> None:
    """Qwen2.5-VL adds four, Qwen3-VL five, both also to images; other models add none."""
    pruned = widths(SimpleNamespace(vision_config=DEEPSTACK), video_pruning_rate=0.5)
    assert pruned == {128, 128 + 4, 128 + 5}
    assert widths(SimpleNamespace(vision_config=PLAIN), video_pruning_rate=0.5) == {32, 36, 37}


def test_granite_4_vision_packs_every_level() -> None:
    """The language model's embedding is not one of the levels."""
    granite = SimpleNamespace(
        vision_config=PLAIN,
        deepstack_layer_map=[[-19, 9], [-13, 6]],
        spatial_target_layers=[12, 15, 18],
    )
    assert widths(granite) == {5 * 32}


@pytest.mark.parametrize(
    ("audio", "injected", "levels"),
    [
        (SimpleNamespace(deepstack_encoder_layer_indexes=[8, 16, 24, 30]), None, 4),
        ({"deepstack_encoder_layer_indexes": [8, 16, 24, 30]}, 2, 2),
        ({"deepstack_encoder_layer_indexes": []}, None, 0),
        ({}, 9, 3),
    ],
)
def test_moss_audio_packs_the_injected_levels(
    audio: Any, injected: int | None, levels: int
) -> None:
    moss = SimpleNamespace(
        model_type="moss_audio", audio_config=audio, deepstack_num_inject_layers=injected
    )
    assert widths(moss) == {32, (1 + levels) * 32}
