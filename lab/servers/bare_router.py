# SPDX-License-Identifier: Apache-2.0
"""A router that does next to nothing, as a separate process, in front of local engines."""

import sys
from collections.abc import Sequence
from pathlib import Path

from lab.servers.processes import Server

_PROGRAM = Path(__file__).parent / "bare_router_server.py"


class BareRouterProcess(Server):
    """`bare_router_server.py`, for one engine of each stage."""

    def __init__(self, log_dir: str | Path, engines: Sequence[Server]) -> None:
        """`engines`: one for encode, prefill and decode each."""
        super().__init__("bare-router", log_dir)
        self._urls = [engine.base_url for engine in engines]

    def command(self) -> list[str]:
        """Return the command line of the script."""
        return [sys.executable, str(_PROGRAM), str(self.port.number), *self._urls]
