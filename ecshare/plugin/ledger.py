# SPDX-License-Identifier: Apache-2.0
"""Passes a worker's counts to the scheduler half of its engine through a small file.

vLLM's V1 runner drops the workers' reports of an engine that only encodes, so its metrics would not
show whether its embeddings were stored. Each worker therefore also writes its sums to a file in the
host cache's folder, which is private to the user, and the scheduler half reads them. The numbers
are sums since the worker started, so a count that also arrives in a report counts once.
"""

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from ecshare.store.hostcache.cache import HostCache
from ecshare.transfer.stats import is_gauge

Totals = dict[int, dict[str, float]]
"""Sums by rank, by name."""

_FOLDER = ".ledgers"
_MAX_BYTES = 1 << 16
_ABANDONED_S = 7 * 86_400.0  # the engine was killed before it could remove its files
_decoder = msgspec.json.Decoder(dict[str, float])


class Ledger:
    """The files of one engine. Any thread, but no vLLM hook: it reads and writes files."""

    def __init__(self, root: Path, engine_id: str) -> None:
        """Use a folder below `root`. `engine_id`: a text that only this engine's processes share.

        Reads and writes no file yet.
        """
        self._folder = root / _FOLDER
        # Hashed, because the user may have chosen the id.
        self._name = hashlib.sha256(engine_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def write(self, rank: int, totals: dict[str, float]) -> None:
        """Replace the sums of `rank`. Errors are ignored: only counts are lost."""
        path = self._folder / f"{self._name}.{rank}"
        temporary = path.with_suffix(f".{rank}.new")
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            temporary.write_bytes(msgspec.json.encode(totals))
            temporary.replace(path)

    def read(self) -> Totals:
        """Return the sums of the engine's workers. Unreadable files are left out."""
        totals: Totals = {}
        for path in self._folder.glob(f"{self._name}.*"):
            rank = path.suffix.removeprefix(".")
            if rank.isdecimal():
                with contextlib.suppress(OSError, msgspec.DecodeError), path.open("rb") as file:
                    totals[int(rank)] = _decoder.decode(file.read(_MAX_BYTES))
        return totals

    def close(self) -> None:
        """Remove the engine's files, and those of engines that were killed long ago."""
        now_s = time.time()
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    is_ours = entry.name.startswith(f"{self._name}.")
                    if is_ours or now_s - entry.stat().st_mtime > _ABANDONED_S:
                        os.unlink(entry.path)


def open_ledger(vllm_config: Any, host: HostCache) -> Ledger:
    """Return the ledger of the engine that `vllm_config` describes; its processes get the same."""
    engine_id = vllm_config.ec_transfer_config.engine_id
    # Not the rank: vLLM makes engines that share no layers independent, each of rank 0.
    return Ledger(host.root, f"{engine_id}.{vllm_config.parallel_config.data_parallel_index}")


def grown(before: Totals, now: Totals) -> dict[str, float]:
    """Return how much each sum of `now` exceeds that of `before`, added over ranks.

    `before` is updated. A smaller sum is an old one that arrived late, and adds nothing.
    """
    growth: dict[str, float] = {}
    for rank, sums in now.items():
        known = before.setdefault(rank, {})
        for name, total in sums.items():
            more = total - known.get(name, 0)
            if is_gauge(name):
                growth[name] = total
            elif more > 0:
                known[name] = total
                growth[name] = growth.get(name, 0) + more
    return growth
