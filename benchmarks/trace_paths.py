# SPDX-License-Identifier: Apache-2.0
"""Count our files and types that a save and a load pass through.

A transfer engine over a folder store stores one object, and one on another host fetches it. Every
call of our functions below `submit` is recorded, on all threads. A change of file is a call in
another file than the previous call, in order of time. For KV, a rank's worker loads one chunk.

    python -m benchmarks.trace_paths [--calls]
"""

import argparse
import dis
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from ecshare.plugin.ranks import Rank
from ecshare.store.format import TensorSpec
from ecshare.store.keys import Key, Kind, object_key
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Fetch, Outcome, Put, StoredObject
from kvshare.chunks.layers import AttentionWindow, LayerSet
from kvshare.chunks.prefix import ChunkKey
from kvshare.config import OPTIONS_PATH, KVConfig
from kvshare.messages import LoadOrder, Orders, Piece
from kvshare.worker.worker import CacheShape, KVWorker

ROOT = Path(__file__).resolve().parent.parent
OURS = ("ecshare", "kvshare")
NAMESPACE = "0" * 32
KEY = object_key(Kind.EC, NAMESPACE, "an object")
NUM_BYTES = 1 << 16
BLOCKS, HEADS, TOKENS, CONTENT = 4, 2, 16, 8
GIVE_UP_S = 20.0


class Trace:
    """The calls of our functions on all threads, in order of time."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, types.CodeType]] = []
        """The thread and the code of each call."""

    def note(self, frame: types.FrameType, event: str, _: object) -> None:
        """See sys.setprofile."""
        code = frame.f_code
        if event == "call" and _room(code) and frame.f_lasti <= _first_resume(code):
            self.calls.append((threading.current_thread().name, code))

    @property
    def files(self) -> list[str]:
        """Return the file of each call."""
        return [name for _, code in self.calls if (name := _room(code)) is not None]

    @property
    def num_changes(self) -> int:
        """Return the number of calls in another file than the call before."""
        files = self.files
        return sum(one != other for one, other in zip(files, files[1:], strict=False))

    def types(self) -> set[type]:
        """Return our classes to which called functions belong, or that these name in bodies."""
        found: set[type] = set()
        for _, code in self.calls:
            module = sys.modules.get(_module(code))
            names = (code.co_qualname.partition(".")[0], *code.co_names)
            named = (getattr(module, name, None) for name in names)
            found.update(each for each in named if isinstance(each, type) and _is_ours(each))
        return found


@cache
def _room(code: types.CodeType) -> str | None:
    """Return the path of our function in the repository; None: not ours, or part of another."""
    path = code.co_filename
    if not path.startswith(str(ROOT)) or code.co_name in ("<genexpr>", "<listcomp>", "<lambda>"):
        return None
    name = str(Path(path).relative_to(ROOT))
    return name if name.startswith(OURS) else None


@cache
def _first_resume(code: types.CodeType) -> int:
    """Return the offset where a call begins. Later offsets are of coroutines that resume."""
    return next((each.offset for each in dis.get_instructions(code) if each.opname == "RESUME"), 0)


def _module(code: types.CodeType) -> str:
    name = str(Path(code.co_filename).relative_to(ROOT)).removesuffix(".py")
    return name.removesuffix("/__init__").replace("/", ".")


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(OURS)


@contextmanager
def traced(trace: Trace) -> Iterator[None]:
    """Record the calls of the body, and of the threads that begin after `listen`."""
    _Switch.trace = trace
    sys.setprofile(trace.note)
    try:
        yield
    finally:
        sys.setprofile(None)
        _Switch.trace = None


class _Switch:
    """The trace for the threads of an engine, which start long before the traced path."""

    trace: Trace | None = None

    @classmethod
    def note(cls, frame: types.FrameType, event: str, argument: object) -> None:
        """See sys.setprofile."""
        if cls.trace is not None:
            cls.trace.note(frame, event, argument)


def save_and_fetch(folder: Path) -> tuple[Trace, Trace]:
    """Return the calls below `submit` of a Put and of a Fetch; other objects warm up."""
    spec, staging = TensorSpec("U8", (NUM_BYTES,)), Staging(torch.device("cpu"), 1 << 20)
    save, fetch = Trace(), Trace()
    writer, reader = _engine(folder, "writer"), _engine(folder, "reader")
    for trace, key in ((Trace(), Key(f"{KEY}.warm")), (save, KEY)):
        slab = staging.reserve(spec)
        assert slab is not None
        with traced(trace):
            writer.submit(Put(key, slab))
            _end(writer)
    for trace, key in ((Trace(), Key(f"{KEY}.warm")), (fetch, KEY)):
        with traced(trace):
            reader.submit(Fetch(key, GIVE_UP_S))
            _end(reader)
    for engine in (writer, reader):
        engine.close()
    return save, fetch


def _engine(folder: Path, host: str) -> TransferEngine:
    config = KVConfig(url=f"file://{folder}/store", host_cache_dir=f"{folder}/{host}")
    return TransferEngine(config, OPTIONS_PATH)


def _end(engine: TransferEngine) -> None:
    """Wait for jobs in flight; the calls of the waiting thread are not part of the path."""
    sys.setprofile(None)
    for done in engine.drain(GIVE_UP_S):
        assert done.outcome is Outcome.OK, done
        if isinstance(done.value, StoredObject):
            done.value.release()


def kv_load(folder: Path) -> Trace:
    """Return the calls of one rank's worker that loads a chunk, from its orders to its report."""
    layer_set = LayerSet(0, (0,), (("l.0", 0),), AttentionWindow(), HEADS, HEADS)
    shape = CacheShape(BLOCKS, TOKENS, (layer_set,), 1)
    key, trace = ChunkKey(b"\1" * 32), Trace()
    piece = Piece(key, 2, 2 * TOKENS, ((0, 1),))
    for host in ("kv-writer", "kv-reader"):
        engine = _engine(folder, host)
        worker = KVWorker(_kv_config(folder, host), shape, Rank(0, 1), engine)
        worker.register({"l.0": torch.rand(BLOCKS, HEADS, TOKENS, CONTENT)})
        if host == "kv-writer":
            worker.save(Orders(NAMESPACE, saves=(piece,)))
            _settle(worker, engine)
        else:
            with traced(trace):
                worker.load(Orders(NAMESPACE, loads=(LoadOrder("r", (piece,)),)))
                _settle(worker, engine)
        worker.close()
    return trace


def _kv_config(folder: Path, host: str) -> KVConfig:
    return KVConfig(url=f"file://{folder}/store", host_cache_dir=f"{folder}/{host}")


def _settle(worker: KVWorker, engine: TransferEngine) -> None:
    """Wait for a job to end, without tracing; then have the worker process it."""
    profile, quiet = sys.getprofile(), threading.Event()
    sys.setprofile(None)
    while engine._done.empty():
        quiet.wait(0.001)
    sys.setprofile(profile)
    worker.settle()


def main(words: list[str] | None = None) -> None:
    """Print the figures of each path; with `--calls` every call, too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", action="store_true", help="each call, in the order of time")
    options = parser.parse_args(words)
    threading.setprofile(_Switch.note)
    with tempfile.TemporaryDirectory() as folder:
        save, fetch = save_and_fetch(Path(folder))
        paths = {"save": save, "fetch": fetch, "KV load": kv_load(Path(folder))}
    threading.setprofile(None)
    show(paths, calls=options.calls)


def show(paths: Mapping[str, Trace], *, calls: bool) -> None:
    """Print the figures of each path, and with `calls` every call."""
    for name, trace in paths.items():
        threads = [thread for thread, _ in trace.calls]
        hops = sum(one != other for one, other in zip(threads, threads[1:], strict=False))
        kinds = trace.types()
        num_kv = sum(kind.__module__.startswith("kvshare") for kind in kinds)
        print(
            f"{name}: {len(trace.calls)} calls, {len(set(trace.files))} files, "
            f"{trace.num_changes} changes of file, {hops} of thread, "
            f"{len(kinds)} types, {num_kv} of kvshare"
        )
        if calls:
            for (thread, code), file in zip(trace.calls, trace.files, strict=True):
                print(f"    {thread:18} {file:40} {code.co_qualname}")


if __name__ == "__main__":
    main()
