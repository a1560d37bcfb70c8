# SPDX-License-Identifier: Apache-2.0
"""Small models that are made once and kept, for programs that avoid loading torch."""

import hashlib
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).with_name("models")


def model(cache: Path, family: str = "qwen2.5-vl", seed: int = 0) -> Path:
    """Return the folder in `cache` with the model; create it if needed.

    A changed recipe creates a new one. This takes six seconds in a process of its own, and less
    than one in a process that has imported `lab.models`.

    Raises:
        RuntimeError: it could not be created; quotes the output.
    """
    recipes = b"".join(file.read_bytes() for file in sorted(RECIPES.glob("*.py")))
    recipe = hashlib.sha256(recipes).hexdigest()[:12]
    path = cache / f"{family}-seed{seed}-{recipe}"
    if not path.exists():
        try:
            _make(family, path, seed)
        except OSError as error:
            if not path.exists():  # it exists if another program made it first
                raise RuntimeError(f"the model could not be made: {error}") from error
    return path


def _make(family: str, path: Path, seed: int) -> None:
    """Make the model in this process if it has imported what that takes, or in another one.

    Raises:
        OSError: it could not be created, or exists.
    """
    if (imported := sys.modules.get("lab.models")) is not None:
        imported.FAMILIES[family](path, seed)
        return
    command = [sys.executable, "-m", "lab.models", family, str(path), f"--seed={seed}"]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    if made.returncode != 0:
        raise OSError(made.stderr.strip())
