# SPDX-License-Identifier: Apache-2.0
"""Engines that compute nothing, as processes: to measure routers with, and to kill."""

import sys
from collections.abc import Sequence
from pathlib import Path

from lab.servers.processes import Server

_PROGRAM = Path(__file__).parent / "stand_in_server.py"


class StandIn(Server):
    """An engine of one stage that answers each chat completion the same. It can be killed and
    started again."""

    def __init__(
        self, name: str, log_dir: str | Path, stage: str, options: Sequence[str] = ()
    ) -> None:
        """`stage` and `options` as in `stand_in_server.py`."""
        super().__init__(name, log_dir)
        self.stage = stage
        self._arguments = [stage, str(self.port.number), *options]

    def command(self) -> list[str]:
        """Return the command line. Without site packages the script starts faster."""
        return [sys.executable, "-S", str(_PROGRAM), *self._arguments]
