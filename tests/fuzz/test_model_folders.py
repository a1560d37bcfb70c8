# SPDX-License-Identifier: Apache-2.0
"""Folders of LoRA adapters with malformed files: they have a fingerprint, or none."""

import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from safetensors.torch import save

from ecshare.plugin.adapters import adapter_fingerprint
from tests.fuzz.running import fuzzed
from tests.fuzz.values import mutated, written

pytestmark = pytest.mark.fuzz

WHOLE = save({"a": torch.ones(4, 4), "b": torch.zeros(3)})
(HEADER_BYTES,) = struct.unpack_from("<Q", WHOLE)
HEADER = json.loads(WHOLE[8 : 8 + HEADER_BYTES])
OFFSETS = st.integers(-2, 80) | st.sampled_from([2**31, 2**63, 2**64, -(2**63), 1.5, "1", None])
NAMES = ["adapter_model.safetensors", "model.safetensors", "adapter_model.bin", "config.json"]


@pytest.fixture(scope="module")
def folders() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # noqa: S108
        yield Path(folder)


@st.composite
def files(draw: DrawFn) -> bytes:
    match draw(st.integers(0, 5)):
        case 0:
            return WHOLE[: draw(st.integers(0, len(WHOLE)))]
        case 1:
            lengths = st.sampled_from([0, 1, 2, HEADER_BYTES - 1, 2**63, 99_999_999])
            return struct.pack("<Q", draw(lengths)) + WHOLE[8:]
        case 2:
            depth = draw(st.sampled_from([100, 6000]))
            return struct.pack("<Q", depth) + b"[" * depth
        case 3:
            header = json.loads(json.dumps(HEADER))
            header["a"]["data_offsets"] = draw(st.lists(OFFSETS, max_size=3))
            text = written(header)
        case _:
            text = written(draw(mutated(HEADER)), ascii_only=draw(st.booleans()))
    return struct.pack("<Q", len(text)) + text + WHOLE[8 + HEADER_BYTES :]


@fuzzed(250)
@given(
    st.dictionaries(st.sampled_from(NAMES), files(), max_size=2),
    st.sampled_from(["", "config.json", "x.safetensors"]),
    st.booleans(),
)
def test_malformed_folders_have_a_fingerprint_or_none(
    folders: Path, held: dict[str, bytes], odd: str, is_link: bool
) -> None:
    folder = Path(tempfile.mkdtemp(dir=folders))
    try:
        for name, content in held.items():
            (folder / name).write_bytes(content)
        if odd and odd not in held and is_link:
            (folder / odd).symlink_to("/nowhere")
        elif odd and odd not in held:
            (folder / odd).mkdir()
        found = adapter_fingerprint(folder)
        assert len(found) in (0, 32)
        assert found == adapter_fingerprint(folder)
    finally:
        shutil.rmtree(folder)
