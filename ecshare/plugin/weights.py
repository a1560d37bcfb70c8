# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of a model's files: cheap to compute, different for different weights.

Two checkpoints of one architecture have the same names, sizes and headers, so those are not enough.
Training changes nearly every number of a tensor, so short samples of each tensor distinguish two
checkpoints, for a few thousand small reads instead of many gigabytes.
"""

import hashlib
import json
import operator
import os
import stat
from collections.abc import Iterator
from pathlib import Path

# Configuration that changes embeddings or KV although the weights are the same.
_CONFIG_FILES = (
    "adapter_config.json",
    "config.json",
    "params.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLE_BYTES = 512
_EVEN_SAMPLES = 256
# The safetensors format's own limit.
_MAX_HEADER_BYTES = 100_000_000


def fingerprint(folder: Path) -> str:
    """Return 32 hex digits that identify the model in `folder`; equal on every host.

    They cover file names, sizes, the small configuration files, safetensors headers, and samples of
    every tensor, but neither paths nor times.

    Raises:
        OSError: a file cannot be read, or the folder contains no weights.
        ValueError: a file is malformed.
    """
    digest, num_weight_files = hashlib.sha256(), 0
    for path in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if path.name in _CONFIG_FILES:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
                raise ValueError(f"{path.name} is not a file")
            _update(digest, path.name, path.read_bytes())
        elif path.suffix in _WEIGHT_SUFFIXES and path.is_file():
            num_weight_files += 1
            for piece in _samples(path):
                _update(digest, path.name, piece)
    if not num_weight_files:
        raise FileNotFoundError(f"{folder} contains no weights")
    return digest.hexdigest()[:32]


def _update(digest: "hashlib._Hash", name: str, content: bytes) -> None:
    """Add one piece with its lengths, so that no two sequences of pieces hash alike."""
    label = name.encode()
    digest.update(len(label).to_bytes(8, "little") + label)
    digest.update(len(content).to_bytes(8, "little") + content)


def _samples(path: Path) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        yield size.to_bytes(8, "little")
        header = _safetensors_header(descriptor, size) if path.suffix == ".safetensors" else None
        if header is None:
            # The positions of the tensors are unknown: take evenly spaced samples.
            step = max(1, size // _EVEN_SAMPLES)
            for offset in range(0, size, step):
                yield os.pread(descriptor, _SAMPLE_BYTES, offset)
            return
        yield header
        first = 8 + len(header)
        for start, end in _tensor_ranges(header, size - first, path.name):
            middle = (start + end) // 2
            yield os.pread(descriptor, min(_SAMPLE_BYTES, end - start), first + start)
            yield os.pread(descriptor, min(_SAMPLE_BYTES, end - middle), first + middle)
    finally:
        os.close(descriptor)


def _safetensors_header(descriptor: int, size: int) -> bytes | None:
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
        return None
    return os.pread(descriptor, length, 8)


def _tensor_ranges(header: bytes, num_bytes: int, file: str) -> Iterator[tuple[int, int]]:
    """Yield the byte range of each tensor, within the `num_bytes` that follow the header.

    Raises:
        ValueError: the header of `file` is malformed.
    """
    try:
        tensors = json.loads(header)
        ranges = [tensors[name]["data_offsets"] for name in dict(tensors) if name != "__metadata__"]
        found = [(operator.index(start), operator.index(end)) for start, end in ranges]
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise ValueError(f"{file} has a malformed header: {type(exc).__name__}") from exc
    for start, end in found:
        if not 0 <= start <= end <= num_bytes:
            raise ValueError(f"{file} has a malformed header: a tensor ends at byte {end}")
        yield start, end
