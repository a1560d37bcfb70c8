# SPDX-License-Identifier: Apache-2.0
"""Device operations of the worker halves, counted on a CPU that stands in for a GPU.

On a GPU torch's operations in a hook are launches, allocations and sometimes waits for the device.
Copies of blocks are calls to the driver.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lab.gpu_kit import workers
from lab.gpu_kit.kit import Bench
from lab.gpu_kit.layouts import EIGHT_B, LAYOUTS, bits, fill, make_cache
from lab.gpu_kit.workers import EncoderHost, KVHost, chunks, drawn
from lab.gpu_stand_in import Event, Gpu, Stream, stand_in

CHUNK_BLOCKS = 16
CHUNKS = 4
SIZES = replace(EIGHT_B, blocks=CHUNKS * CHUNK_BLOCKS)
MIB = 1 << 20
# These wait for the device if one of their tensors is on it.
WAITS = {"_local_scalar_dense", "_to_copy", "equal", "is_nonzero", "nonzero", "tensor", "tolist"}


class Device:
    """Records launches and operations by thread."""

    def __init__(self, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = gpu
        self.launches: list[str] = []
        """The thread of each copy, device-side wait and event."""
        self.operations: list[tuple[str, str]] = []
        """The thread and name of each torch operation, without views."""
        self._is_at_work = threading.local()
        self._note(monkeypatch, Stream, "launch")
        self._note(monkeypatch, Event, "record")
        run_to = Stream.run_to

        def at_work(stream: Stream, end: int) -> None:
            before, self._is_at_work.now = getattr(self._is_at_work, "now", False), True
            try:
                run_to(stream, end)
            finally:
                self._is_at_work.now = before

        monkeypatch.setattr(Stream, "run_to", at_work)

    def _note(self, monkeypatch: pytest.MonkeyPatch, kind: type[Any], name: str) -> None:
        real: Callable[..., None] = getattr(kind, name)

        def noted(*args: Any) -> None:
            self.launches.append(threading.current_thread().name)
            real(*args)

        monkeypatch.setattr(kind, name, noted)

    def watch(self) -> None:
        """Record the operations of this thread from now on."""
        for mode in (Dispatched, Called):
            mode(self).__enter__()  # type: ignore[no-untyped-call]

    def noted(self, name: str) -> None:
        if not getattr(self._is_at_work, "now", False):
            self.operations.append((threading.current_thread().name, name))

    @contextmanager
    def hook(self) -> Iterator[None]:
        """Clear the records, and record the operations of the body."""
        self.launches.clear()
        self.operations.clear()
        with Dispatched(self), Called(self):
            yield

    def of_hooks(self) -> list[str]:
        """Return the torch operations of this thread."""
        own = threading.current_thread().name
        return [name for thread, name in self.operations if thread == own]


class Dispatched(TorchDispatchMode):
    """Records the operations of its thread, without views and the device's own work."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not operation.is_view:
            self._device.noted(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Records calls of its thread that are operations only on a device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.__name__ in ("tensor", "tolist"):
            self._device.noted(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(stand_in(monkeypatch), monkeypatch)
    # All threads of the worker halves call it at their start.
    monkeypatch.setattr(workers, "device_selector", lambda _: device.watch)
    return device


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(torch.device("cpu"), tmp_path)


def cache(layout: str = "LBHNC") -> Tensor:
    return make_cache(SIZES, layout, torch.bfloat16, torch.device("cpu"))


def pieces(count: int = CHUNKS) -> list[Any]:
    """Make chunks with unordered block ids."""
    ids = [number * 7 % SIZES.blocks for number in range(count * CHUNK_BLOCKS)]
    return chunks(ids, CHUNK_BLOCKS, SIZES.block_tokens, prompt=str(count))


@pytest.mark.parametrize(
    ("layout", "stored_dtype"), [*((each, "auto") for each in LAYOUTS), (LAYOUTS[0], "fp8")]
)
def test_many_saves_in_a_step_launch_as_much_as_one(
    device: Device, bench: Bench, layout: str, stored_dtype: Any
) -> None:
    counts, own = set(), {"buffer_bytes": 256 * MIB, "stored_dtype": stored_dtype}
    with KVHost(bench, cache(layout), bench.folder(), **own) as host:
        for count in (1, CHUNKS):
            with device.hook():
                host.save(*pieces(count))
                launched = len(device.launches)  # before threads of the transfer engine wait
            host.settle()
            counts.add(launched)
            assert not device.of_hooks()
            assert len(device.gpu.batches) == 1, "one call copies all"
            device.gpu.batches.clear()
        assert not host.counts().get("blocks/dropped")
    assert len(counts) == 1
    assert max(counts) <= 2 * SIZES.layers


def test_hooks_launch_only_one_event_for_loads(device: Device, bench: Bench) -> None:
    """Other threads launch the copies, one for each filled buffer."""
    source, target, store = cache(), cache(), bench.folder()
    fill(source, 1)
    with KVHost(bench, source, store, buffer_bytes=256 * MIB) as host:
        host.save(*pieces())
        host.settle()
    with KVHost(bench, target, store, buffer_bytes=256 * MIB) as host:
        device.gpu.batches.clear()
        with device.hook():
            host.load("r", *pieces())
            host.end_step()
            hook = threading.current_thread().name
        assert not host.settle().invalid_blocks
        assert not device.operations, "neither in hooks nor on load threads"
    assert device.launches.count(hook) == 1
    assert len(device.gpu.batches) == source.nbytes // (16 * MIB)
    assert len(device.launches) <= 2 * SIZES.layers * CHUNKS
    assert torch.equal(bits(source), bits(target))


def test_hooks_without_orders_call_no_device_operation(device: Device, bench: Bench) -> None:
    with KVHost(bench, cache(), bench.folder()) as host:
        with device.hook():
            host.save_leaving()
            host.load("nothing")
            host.save()
            host.end_step()
            host.counts()
        assert not device.of_hooks()
        assert len(device.launches) == 1


def test_hooks_for_embeddings_do_not_wait_for_the_device(device: Device, bench: Bench) -> None:
    """A save is one copy. A load allocates memory and is two copies."""
    embedding = drawn(1000, 64, torch.bfloat16, torch.device("cpu"))
    with EncoderHost(bench, bench.folder()) as host:
        host.encode("warm up", embedding)
        with device.hook():
            host.encode("picture", embedding)
            host.counts()
        assert not device.of_hooks()
        host.wait_for("saved", 2)
        with device.hook():
            host.load("picture")
        assert device.of_hooks() == ["copy_", "empty_like"]
        assert not WAITS & set(device.of_hooks())
        assert torch.equal(bits(host.cache["picture"]), bits(embedding))


@pytest.mark.parametrize(
    "operation",
    [
        lambda: torch.tensor([1, 2]),
        lambda: torch.ones(1).item(),
        lambda: torch.ones(2).tolist(),
        lambda: torch.ones(1).to(torch.float64),
        lambda: torch.ones(1).nonzero(),
        lambda: bool(torch.ones(1)),
    ],
)
def test_waiting_operations_are_detected(device: Device, operation: Callable[[], object]) -> None:
    with device.hook():
        operation()
    assert WAITS & set(device.of_hooks())
