# SPDX-License-Identifier: Apache-2.0
"""Writes constraints.txt: the exact versions in `.venv`, for pip's --constraint.

Run by `make constraints`, with the Python of `.venv`. `make setup` installs these versions, so the
gate runs with them, and a bug can be reproduced with them.
"""

import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "constraints.txt"
HEADER = """\
# The versions that the tests run with. Written by `make constraints`; not edited by hand.
# pip install --constraint constraints.txt ... installs the same ones.
"""
# torch is required in one exact build; the others of its family are optional, and are installed
# from where torch comes from, or not at all.
LEFT_OUT = {"torch", "torchaudio", "torchcodec"}


def constraints(frozen: str) -> str:
    """Return the file's text from what `pip freeze` has printed."""
    lines = []
    for line in frozen.splitlines():
        name, equals, version = line.partition("==")
        if equals and name not in LEFT_OUT:
            lines.append(f"{name}=={version.partition('+')[0]}\n")
    return HEADER + "".join(lines)


def main() -> None:
    """Write the file."""
    freeze = [sys.executable, "-m", "pip", "freeze", "--exclude-editable"]
    ran = subprocess.run(freeze, check=True, stdout=subprocess.PIPE, text=True)
    text = constraints(ran.stdout)
    FILE.write_text(text)
    print(f"{FILE.name}: {text.count('==')} versions")


if __name__ == "__main__":
    main()
