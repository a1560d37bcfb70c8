# SPDX-License-Identifier: Apache-2.0
"""The router as a process of its own, in front of local engines."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.servers.processes import Server


class RouterProcess(Server):
    """`python -m ecshare.router`; healthy when its engines are."""

    def __init__(
        self,
        name: str,
        log_dir: str | Path,
        engines: Mapping[str, Sequence[Server]],
        options: Sequence[str] = (),
    ) -> None:
        """`engines` by "encoder", "prefiller" and "decoder"; `options` as on the command line."""
        super().__init__(name, log_dir)
        urls = [f"--{stage}={each.base_url}" for stage, those in engines.items() for each in those]
        self._arguments = [*urls, *options]

    def command(self) -> list[str]:
        """Return the command line. The router listens on its port, whatever the options say."""
        port = f"--port={self.port.number}"
        return [sys.executable, "-m", "ecshare.router", *self._arguments, port]
