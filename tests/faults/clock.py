# SPDX-License-Identifier: Apache-2.0
"""A clock that can be moved for running processes of a test, and for no others."""

import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")
_SECONDS = struct.Struct("=q")


class Clock:
    """The time of day of each process that starts with `environment`.

    Needs a C compiler: raises FileNotFoundError where there is none.
    """

    def __init__(self, folder: Path) -> None:
        """Compile the library that those processes preload. `folder` must stay."""
        compiler = shutil.which("cc")
        if compiler is None:
            raise FileNotFoundError("no C compiler (cc)")
        self._library = folder / "clock.so"
        self._ahead = folder / "clock"
        self.move(0)
        flags = ["-shared", "-fPIC", "-O2", "-o", str(self._library)]
        subprocess.run([compiler, *flags, str(_SOURCE), "-ldl"], check=True)

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of a process that uses this clock."""
        return {"LD_PRELOAD": str(self._library), "ECSHARE_CLOCK": str(self._ahead)}

    def move(self, ahead_s: int) -> None:
        """Set the clock `ahead_s` ahead of the real time; negative: behind it."""
        with self._ahead.open("r+b" if self._ahead.exists() else "wb") as file:
            file.write(_SECONDS.pack(ahead_s))  # in place: it is mapped
