# SPDX-License-Identifier: Apache-2.0
"""A process that exits without `close` drops its pending jobs silently."""

import subprocess
import sys
from pathlib import Path

from ecshare.store.config import StoreConfig
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Lookup, Outcome

ENDS_AT_ONCE = """
import logging, sys, torch
from ecshare.store.config import StoreConfig
from ecshare.store.format import TensorSpec
from ecshare.store.keys import Kind, object_key
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Lookup, Put
from ecshare.transfer.device.staging import Staging

logging.basicConfig(level=logging.WARNING)
engine = TransferEngine(StoreConfig(url=sys.argv[1], host_cache_dir=sys.argv[2]), "options")
engine.probe(write=True)
staging, spec = Staging(torch.device("cpu"), 1 << 26), TensorSpec("U8", (100_000,))
for number in range(300):
    slab = staging.reserve(spec)
    staging.copy_out(slab, torch.zeros(spec.shape, dtype=torch.uint8))
    key = object_key(Kind.KV, "0" * 32, str(number), "t0of1")
    engine.submit(Put(key, slab), Lookup((key,), 5.0, store_only=True))
"""


def test_process_exits_silently_with_pending_jobs(tmp_path: Path) -> None:
    url, host = f"file://{tmp_path}/store", str(tmp_path / "host")
    script = [sys.executable, "-c", ENDS_AT_ONCE, url, host]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


LEFT_OPEN = """
import atexit, sys, threading
from ecshare.store.config import StoreConfig
from ecshare.transfer.engine import TransferEngine

def ours():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("ecshare"))

atexit.register(lambda: print(ours()))
config = StoreConfig(url=sys.argv[1], host_cache_dir=sys.argv[2])
left, closed = (TransferEngine(config, "options") for _ in range(2))
closed.close()
TransferEngine(config, "options")  # no reference to it is left
print(ours())
"""


def test_engine_threads_stop_at_interpreter_exit(tmp_path: Path) -> None:
    """A daemon thread is stopped anywhere; inside C++ this would end the process by SIGABRT."""
    script = [sys.executable, "-c", LEFT_OPEN, f"file://{tmp_path}/store", str(tmp_path / "host")]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=120, check=True)
    running = 2 * ["ecshare-inbox"] + 2 * ["ecshare-io"]
    assert ended.stdout == f"{running}\n[]\n"


def test_stopped_engine_rejects_jobs(tmp_path: Path) -> None:
    config = StoreConfig(url=f"file://{tmp_path}/store", host_cache_dir=str(tmp_path / "host"))
    engine = TransferEngine(config, "options")
    engine.stop()
    engine.submit(Lookup((), 5.0))
    assert [done.outcome for done in engine.drain(10)] == [Outcome.REJECTED]
