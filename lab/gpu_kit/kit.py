# SPDX-License-Identifier: Apache-2.0
"""The parts that checks share: a bench to play on, results and waiting."""

import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

# Keeps the device busy for about a second, beside hooks that must not wait for it.
_BUSY_CYCLES = 2_000_000_000
WITHIN_S = 60.0


class Skipped(Exception):
    """The check cannot be played on this machine; the message says why."""


@dataclass
class Bench:
    """The device and the folders of checks. Ownership: the main thread."""

    device: torch.device
    root: Path
    """A folder for stores and host caches."""
    engine_arguments: Sequence[str] = ()
    """Of vLLM's command line, for every engine."""
    notes: list[str] = field(default_factory=list)
    """Observations of a check that do not affect its verdict."""

    @property
    def is_gpu(self) -> bool:
        """Return whether this is a real GPU, not a CPU that stands in for one."""
        return self.device.type == "cuda"

    def needs_gpu(self) -> None:
        """Skip the check without a GPU."""
        if not self.is_gpu:
            raise Skipped("needs a GPU")

    def folder(self) -> Path:
        """Return a new, empty folder."""
        return Path(tempfile.mkdtemp(dir=self.root))

    def clear(self) -> None:
        """Remove all folders: some checks leave gigabytes."""
        for folder in self.root.iterdir():
            shutil.rmtree(folder, ignore_errors=True)

    def keep_busy(self) -> None:
        """Have a GPU compute for about a second, on vLLM's stream."""
        if self.is_gpu:
            torch.cuda._sleep(_BUSY_CYCLES)

    def aside(self) -> AbstractContextManager[object]:
        """Have the body launch on a stream of its own, as other users of the device do."""
        return torch.cuda.stream(torch.cuda.Stream(self.device)) if self.is_gpu else nullcontext()

    def finish(self) -> None:
        """Block until the device has done all work that was launched."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def rounds(self, *, unjudged: str = "") -> Iterator[AbstractContextManager[None]]:
        """Yield two contexts for one body: in the first the driver loads what it needs, which may
        wait for the device; the second is `without_waits`.
        """
        yield nullcontext()
        yield self.without_waits(unjudged=unjudged)

    @contextmanager
    def without_waits(self, *, unjudged: str = "") -> Iterator[None]:
        """Keep the device busy. The body must not wait for it, and fails if it does.

        All that the body launches has run at the end. On a CPU only the body runs. `unjudged`: a
        reason why the driver may wait; a wait is then noted and does not fail.
        """
        if not self.is_gpu:
            yield
            return
        self.keep_busy()
        end = torch.cuda.Event()
        end.record()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
            has_waited = end.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            self.finish()
        if has_waited and unjudged:
            self.notes.append(f"a hook has waited for the device: {unjudged}")
        else:
            assert not has_waited, "a hook has waited for the device"


Check = Callable[[Bench], None]


@dataclass(frozen=True)
class Result:
    """The result of a check."""

    name: str
    verdict: str
    """ok, skipped or FAILED."""
    said: str = ""
    """The reason; the traceback of a failure."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def line(self) -> str:
        """Return the result as text for the terminal."""
        reason = f": {self.said}" if self.said else ""
        notes = "".join(f"\n           {note}" for note in self.notes)
        return f"{self.verdict:<9}{self.name} ({self.seconds:.1f} s){reason}{notes}"


def play(check: Check, bench: Bench) -> Result:
    """Play one check. An exception becomes its result. If it fails, its folders stay."""
    bench.notes.clear()
    start_s = time.perf_counter()
    verdict, said = "ok", ""
    try:
        check(bench)
    except Skipped as reason:
        verdict, said = "skipped", str(reason)
    except Exception:  # noqa: BLE001 — the other checks are to be played too
        verdict, said = "FAILED", traceback.format_exc()
    else:
        bench.clear()
    seconds = time.perf_counter() - start_s
    return Result(check.__name__, verdict, said, tuple(bench.notes), seconds)


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Return as soon as `is_so` returns True.

    Raises:
        AssertionError: it does not within a minute; the message quotes `what`.
    """
    deadline_s = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"{what}: not within {WITHIN_S:.0f} s"
        time.sleep(0.0005)
