# SPDX-License-Identifier: Apache-2.0
"""vLLM's example proxy of encode, prefill and decode, as a process of its own.

It is part of vLLM's source distribution: examples/disaggregated/disaggregated_encoder.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from lab.servers.processes import LOOPBACK, Server

_STAGES = ("encode", "prefill", "decode")


class ExampleProxy(Server):
    """The proxy with its defaults."""

    def __init__(self, script: Path, log_dir: str | Path, engines: Sequence[Server]) -> None:
        """`engines`: one for encode, prefill and decode each; `script`: disagg_epd_proxy.py."""
        super().__init__("in-tree-proxy", log_dir)
        stages = zip(_STAGES, engines, strict=True)
        urls = [f"--{stage}-servers-urls={engine.base_url}" for stage, engine in stages]
        self._command = [sys.executable, str(script), f"--host={LOOPBACK}", *urls]

    def command(self) -> list[str]:
        """Return the command line of the script's README."""
        return [*self._command, f"--port={self.port.number}"]
