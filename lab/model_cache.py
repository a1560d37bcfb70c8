# SPDX-License-Identifier: Apache-2.0
"""Small models that are made once and kept, for programs that avoid loading torch."""

import hashlib
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).with_name("models")


def model(cache: Path, family: str = "qwen2.5-vl", seed: int = 0) -> Path:
    """Return the folder in `cache` with the model; create it if needed, in about six seconds.

    A changed recipe creates a new one.

    Raises:
        RuntimeError: it could not be created; quotes the output.
    """
    recipes = b"".join(file.read_bytes() for file in sorted(RECIPES.glob("*.py")))
    recipe = hashlib.sha256(recipes).hexdigest()[:12]
    path = cache / f"{family}-seed{seed}-{recipe}"
    if not path.exists():
        command = [sys.executable, "-m", "lab.models", family, str(path)]
        made = subprocess.run(
            [*command, f"--seed={seed}"], check=False, capture_output=True, text=True
        )
        if made.returncode != 0 and not path.exists():  # it exists if another program made it first
            raise RuntimeError(f"the model could not be made: {made.stderr.strip()}")
    return path
