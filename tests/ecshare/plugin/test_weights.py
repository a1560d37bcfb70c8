# SPDX-License-Identifier: Apache-2.0
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ecshare.plugin.adapters import adapter_fingerprint
from ecshare.plugin.model_facts import weights_fingerprint
from ecshare.plugin.weights import fingerprint


def write_model(folder: Path, seed: int = 0, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layer.{i}": torch.randn(300, 40, generator=generator) for i in range(3)}
    save_file(tensors, folder / name)
    (folder / "config.json").write_text('{"hidden_size": 40}')
    return folder


def test_fingerprint_is_independent_of_the_folder(tmp_path: Path) -> None:
    first = fingerprint(write_model(tmp_path / "a"))
    assert first == fingerprint(write_model(tmp_path / "b"))
    assert len(first) == 32
    int(first, 16)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """The weights are somewhere else, so two such folders would look alike."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="contains no weights"):
        fingerprint(tmp_path)


def test_other_weights_of_the_same_shape_change_the_fingerprint(tmp_path: Path) -> None:
    assert fingerprint(write_model(tmp_path / "a")) != fingerprint(write_model(tmp_path / "b", 1))


def test_one_changed_tensor_changes_the_fingerprint(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "a")
    before = fingerprint(folder)
    tensors = {f"layer.{i}": torch.zeros(300, 40) for i in range(3)}
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    tensors["layer.1"] += 1e-3
    save_file(tensors, folder / "model.safetensors")
    assert fingerprint(folder) != before


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_configuration_changes_the_fingerprint(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "a")
    before = fingerprint(folder)
    (folder / name).write_text('{"changed": true}')
    assert fingerprint(folder) != before


def test_readme_and_tokenizer_do_not_change_the_fingerprint(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "a")
    before = fingerprint(folder)
    (folder / "README.md").write_text("words")
    (folder / "tokenizer.json").write_text("{}")
    assert fingerprint(folder) == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf"])
def test_formats_without_an_index_are_sampled_throughout(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "a")
    content = bytearray(torch.randn(100_000).numpy().tobytes())
    (folder / name).write_bytes(content)
    before = fingerprint(folder)
    half = len(content) // 2
    content[half:] = torch.randn(50_000).numpy().tobytes()
    (folder / name).write_bytes(content)
    assert fingerprint(folder) != before


@pytest.mark.parametrize(
    "body", [b"", b"\x00" * 7, b"\xff" * 64, b"\x10\x00\x00\x00\x00\x00\x00\x00"]
)
def test_broken_safetensors_file_is_sampled_as_plain_bytes(tmp_path: Path, body: bytes) -> None:
    folder = write_model(tmp_path / "a")
    (folder / "extra.safetensors").write_bytes(body)
    assert len(fingerprint(folder)) == 32


def safetensors(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\x00" * 64


@pytest.mark.parametrize(
    "header",
    [
        [1, 2],
        77,
        "text",
        {"a": None},
        {"a": 1},
        {"a": {"data_offsets": 3}},
        {"a": {"data_offsets": {"x": 1, "y": 2}}},
        {"a": {"data_offsets": ["0", "4"]}},
        {"a": {"data_offsets": [0.0, 4.0]}},
        {"a": {"data_offsets": [0]}},
        {"a": {"data_offsets": [4, 0]}},
        {"a": {"data_offsets": [-8, 4]}},
        {"a": {"data_offsets": [0, 65]}},
        {"a": {"data_offsets": [0, 1 << 70]}},
        {"a": {}},
        b'{"a": {"data_offsets": [0, 1e400]}}',
        b"[" * 6000,
        b'{"a":' * 6000,
        b'{"a": {"data_offsets": [0, ' + b"9" * 5000 + b"]}}",
        b"\xff\xfe",
        b"no json",
    ],
    ids=lambda header: str(header)[:30],
)
def test_malformed_safetensors_header_is_refused(
    tmp_path: Path, header: object, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors(header))
    with pytest.raises(ValueError, match="adapter_model.safetensors has a malformed header"):
        fingerprint(tmp_path)
    assert adapter_fingerprint(tmp_path) == ""
    assert "has a malformed header" in caplog.text
    assert weights_fingerprint(str(tmp_path), "", "", "auto") == ""


def test_valid_safetensors_header_is_accepted(tmp_path: Path) -> None:
    header = {"a": {"data_offsets": [0, 64]}, "b": {"data_offsets": [64, 64]}, "__metadata__": 1}
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors(header))
    assert len(fingerprint(tmp_path)) == 32


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_pipe_in_place_of_a_configuration_file_does_not_hang(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=f"{name} is not a file"):
        fingerprint(folder)
