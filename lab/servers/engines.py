# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines, started for a test or a demo.

`EngineProcess` runs vLLM's OpenAI server. On a CPU with a model of `lab.models` it is ready in 25
to 30 s, almost all of it imports, and takes about 3 GB, 1 GB of which is KV cache.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from lab import v2_runner
from lab.servers.engine_forks import EngineForks
from lab.servers.fork_server import Request
from lab.servers.processes import LOOPBACK, Guard, Server

ModelRunner = Literal["v1", "v2"]
"""vLLM's model runners: CPU engines have V1, most GPU engines V2."""

MODULE = "vllm.entrypoints.openai.api_server"
# Limits the memory of an engine. Later arguments take precedence.
SMALL = (
    "--max-model-len=4096",
    "--max-num-seqs=8",
    '--limit-mm-per-prompt={"image": 4, "video": 0}',
    "--skip-mm-profiling",
)
# Also makes it start fast, and return the same tokens whatever else is in the batch.
SMALL_ENGINE = (
    "--dtype=float32",  # greedy tokens are compared exactly: no rounding that depends on batching
    "--enforce-eager",
    *SMALL,
)
# Several share a device. With a given KV cache they may start at the same time: otherwise vLLM
# measures free memory, and fails if others take or free some meanwhile.
ON_A_GPU = ("--gpu-memory-utilization=0.2", f"--kv-cache-memory-bytes={2 << 30}")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    # One thread for each engine, on any core. By default an engine pins one thread to every core,
    # and engines on one machine then wait up to a second for a thread that is not scheduled.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A single rank runs in the process of its scheduler, as on a GPU. On a CPU vLLM gives it a
    # process of its own, and of the two, the waiting process then spins on a core.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "PYTHONUNBUFFERED": "1",  # so that the log is complete when the engine ends
}
ON_V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
RANK_APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""The variables that give a single rank its own process, which vLLM can bind to cores."""


class EngineProcess(Server):
    """One vLLM API server with all its child processes.

    `arguments` are those of vLLM's command line; with connectors, for example, they are
    `(*SMALL_ENGINE, ec_argument("producer", url))`. With `ON_V2` in its `environment` it runs the
    V2 model runner; see `lab.v2_runner`. An engine that runs another one counts as failed.
    """

    grace_s = 15.0
    ready_within_s = 300.0

    def __init__(  # noqa: PLR0913 — all that can differ between two engines
        self,
        name: str,
        model: str | Path,
        log_dir: str | Path,
        arguments: Sequence[str] = SMALL_ENGINE,
        environment: Mapping[str, str] | None = None,
        *,
        python: str | Path = sys.executable,
        runner_of_vllm: bool = False,
        forks: EngineForks | None = None,
    ) -> None:
        """`python`: the interpreter, for example of another release of vLLM. `runner_of_vllm`: vLLM
        chooses the model runner, as for its users. `forks`: servers that fork the engine, in a
        sixth of the time, if one has its interpreter and environment; otherwise it starts as users
        start theirs.
        """
        super().__init__(name, log_dir)
        self.model = str(model)
        self._log_begins = 0  # in the log file, of this run's log
        self._python = str(python)
        self._chooses_runner = not runner_of_vllm
        self._forks = forks
        self._arguments = tuple(arguments)
        self._environment = dict(environment or {})
        self._sockets: tempfile.TemporaryDirectory[str] | None = None

    def command(self) -> list[str]:
        """Return `python -m vllm...`: the CPU build's `vllm` program lacks its own metadata."""
        return [self._python, "-m", MODULE, *self._all_arguments()]

    def _all_arguments(self) -> list[str]:
        return [
            *(f"--model={self.model}", f"--host={LOOPBACK}", f"--port={self.port.number}"),
            "--enable-prompt-tokens-details",  # answers report how much of a prompt was cached
            *self._arguments,
        ]

    def environment(self) -> dict[str, str]:
        """Return the environment variables to set for vLLM."""
        # vLLM does not remove the sockets between its processes, so we give it a folder to remove.
        sockets = {} if self._sockets is None else {"VLLM_RPC_BASE_PATH": self._sockets.name}
        own = {**ENVIRONMENT, **sockets, **self._environment}
        if not self._chooses_runner:
            return {name: own[name] for name in own if name not in ON_V2}
        return own | v2_runner.environment({**os.environ, **own}) if asks_for_v2(own) else own

    def start(self) -> None:
        """Start the engine and return at once. Its output is appended to `log_path`."""
        self._sockets = tempfile.TemporaryDirectory(prefix="ecshare-")
        self._log_begins = self.log_path.stat().st_size if self.log_path.exists() else 0
        super().start()

    def _launch(self, log: BinaryIO) -> Guard:
        forked = None
        if self._forks is not None and self._python == sys.executable:
            environment = {**os.environ, **self.environment()}
            request = Request(MODULE, self._all_arguments(), environment, self.grace_s)
            forked = self._forks.start(request, log)
        return super()._launch(log) if forked is None else forked

    def is_ready(self) -> bool:
        """Return whether the engine is ready.

        Raises:
            ServerFailed: it ended, took too long, or runs another model runner than asked for.
        """
        is_ready = super().is_ready()
        if is_ready and self._chooses_runner and self.runs_v2 != asks_for_v2(self.environment()):
            self.stop()
            raise self.failure("runs another model runner than asked for")
        return is_ready

    @property
    def runs_v2(self) -> bool:
        """Return whether the log says that the engine runs the V2 model runner."""
        log = self.log_path.read_bytes()[self._log_begins :]
        return v2_runner.LOGGED.encode() in log

    def _end(self) -> None:
        super()._end()
        if self._sockets is not None:
            self._sockets.cleanup()
            self._sockets = None


def engine_forks(log_dir: str | Path) -> EngineForks:
    """Return fork servers for engines of each model runner, otherwise with our environment."""
    on_v2 = {**ENVIRONMENT, **ON_V2, **v2_runner.environment(os.environ)}
    return EngineForks(log_dir, {"v1": ENVIRONMENT, "v2": on_v2})


def asks_for_v2(environment: Mapping[str, str]) -> bool:
    """Return whether an engine in this environment is to run the V2 model runner."""
    return ON_V2.items() <= environment.items()


def ec_argument(role: str, url: str, **options: Any) -> str:
    """Return the option that loads ECShareConnector. `role`: producer, consumer or both.

    `options` are those of docs/config.md, `storage_options` for example.
    """
    extra = {"url": url, **options}
    return _transfer_argument("ec", role, "ECShareConnector", extra)


def kv_argument(role: str, url: str, **options: Any) -> str:
    """Return the option that loads KVShareConnector; arguments as for `ec_argument`.

    Unless `options` say otherwise, it always loads: computing takes these models no time.
    """
    extra = {"url": url, "load": "always", **options}
    return _transfer_argument("kv", role, "KVShareConnector", extra)


def example_argument(role: str, folder: str | Path) -> str:
    """Return the option that loads vLLM's own ECExampleConnector, for comparison."""
    return _transfer_argument("ec", role, "ECExampleConnector", _example_options(folder))


def kv_example_argument(role: str, folder: str | Path) -> str:
    """Return the option that loads vLLM's own ExampleConnector, for comparison."""
    return _transfer_argument("kv", role, "ExampleConnector", _example_options(folder))


def _example_options(folder: str | Path) -> dict[str, str]:
    return {"shared_storage_path": str(folder)}


def _transfer_argument(kind: str, role: str, connector: str, extra: dict[str, Any]) -> str:
    config = {
        f"{kind}_connector": connector,
        f"{kind}_role": f"{kind}_{role}",
        f"{kind}_connector_extra_config": extra,
    }
    return f"--{kind}-transfer-config={json.dumps(config)}"
