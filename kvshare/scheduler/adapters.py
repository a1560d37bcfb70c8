# SPDX-License-Identifier: Apache-2.0
"""Identifies the LoRA adapter of a request by its content, which becomes part of its KV's names.

vLLM's block hashes contain only an adapter's name (and from 0.31 on its path). Without the content,
an adapter that was trained further and loaded again would find KV of its old weights.
"""

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vllm.v1.request import Request

from ecshare.plugin.adapters import AdapterContents, adapter_fingerprint
from ecshare.plugin.compat import option
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Done, Handle, Run
from kvshare.chunks.prefix import Grid
from kvshare.compat import hashed_adapter


@dataclass(slots=True, eq=False)
class Adapter:
    """The adapter of one request. `grid` names its chunks; None: the content is not known."""

    grid: Grid | None
    is_settled: bool
    """False while its files are being read."""
    hashed_as: Hashable = None
    """Its identity in vLLM's block hashes."""
    deadline_s: float = 0.0
    num_blocks: int = 0
    """The number of blocks of its request's prompt."""


class Adapters:
    """Reads adapters on the I/O thread. Each request waits for that, at most `wait_s`.

    KV of an adapter that cannot be read, or has changed, is neither saved nor loaded: see
    `AdapterContents`.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(
        self,
        engine: TransferEngine,
        grid: Grid,
        *,
        wait_s: float,
        clock_s: Callable[[], float],
    ) -> None:
        """Read no adapter yet. `grid`: of requests without one. `clock_s`: monotonic seconds."""
        self._engine = engine
        self._grid = grid
        self._stats = engine.stats
        self._wait_s = wait_s
        self._clock_s = clock_s
        self._none = Adapter(grid, is_settled=True)
        self._contents = AdapterContents()

    def of(self, request: Request) -> Adapter:
        """Return the adapter of `request`, and start to read it."""
        lora = request.lora_request
        if lora is None:
            return self._none
        num_blocks = -(-(request.num_prompt_tokens - 1) // self._grid.block_tokens)
        deadline_s = self._clock_s() + self._wait_s
        adapter = Adapter(None, False, hashed_adapter(request), deadline_s, num_blocks)
        if option(lora, "tensorizer_config_dict"):
            self._settle(adapter, "")  # its weights are not in `lora_path`
            return adapter
        job = Run("adapter", partial(adapter_fingerprint, Path(lora.lora_path)))
        is_3d = bool(option(lora, "is_3d_lora_weight"))
        self._engine.submit(Handle(job, partial(self._read, adapter, is_3d)))
        return adapter

    def _read(self, adapter: Adapter, is_3d: bool, done: Done[str]) -> None:
        content = done.value or ""
        if content and is_3d:  # the flag changes how vLLM reads the same files
            content = hashlib.sha256(b"3d" + bytes.fromhex(content)).hexdigest()
        self._settle(adapter, content)

    def is_settled(self, adapter: Adapter) -> bool:
        """Return whether the request need not wait any more. Give up when `wait_s` is over."""
        if not adapter.is_settled and self._clock_s() >= adapter.deadline_s:
            self._settle(adapter, "")
        return adapter.is_settled

    def grid_of(self, adapter: Adapter) -> Grid | None:
        """Return the grid that names chunks of `adapter`; None: they are not shared."""
        if adapter is self._none or adapter.grid is None:
            return adapter.grid
        is_as_before = self._contents.are_still(adapter.hashed_as, adapter.grid.adapter.hex())
        return adapter.grid if is_as_before else None

    def _settle(self, adapter: Adapter, content: str) -> None:
        """Finish the adapter. `content`: its fingerprint, "" if it is not known."""
        if adapter.is_settled:
            return
        adapter.is_settled = True
        if content and self._contents.learn(adapter.hashed_as, content):
            adapter.grid = replace(self._grid, adapter=bytes.fromhex(content))
        else:
            self._stats.add("blocks/missed", adapter.num_blocks)
            self._stats.add("misses/unidentified", adapter.num_blocks)
