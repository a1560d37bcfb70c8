# SPDX-License-Identifier: Apache-2.0
"""Transfer engines over a bad S3 server, and the conditions that hold for all its answers.

Saved objects are in the bucket; loads return no wrong byte; no job hangs; `close` returns; no good
object is deleted; failed saves cost no loads; and soon after the server recovers, loads and saves
succeed again.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecshare.encoder.config import EncoderConfig
from ecshare.store.errors import ConfigError
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec
from ecshare.store.keys import Key, Kind, namespace_digest, object_key
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Done, Fetch, Job, Lookup, Outcome, Put, StoredObject
from ecshare.transfer.upkeep.renewal import Record
from tests.bad_s3.faults import LIES, modes
from tests.bad_s3.server import BUCKET, BadS3, Stored, bad_s3
from tests.engines.chat import wait_until

IO_TIMEOUT_S = 3.0
FETCH_TIMEOUT_S = 4.0
HANGS_S = 60.0
"""A job that takes so long counts as hanging."""
QUIET_S = 0.5
"""An engine that still polls would send a request within this time."""
FACTS = {"model": "a model"}
NAMESPACE = namespace_digest(FACTS)
PATH = "options"

SPARE = "spare"
"""The object that no job requests while the server fails."""
SHAPES = {"small": (16, 64), "medium": (300, 1024), "large": (2, 1 << 20), SPARE: (16, 64)}
ASKED = [name for name in SHAPES if name != SPARE]
NO_MD5 = f'"{"0" * 32}-2"'
"""An ETag as of an object that was encrypted, or uploaded in parts."""
ROADS = ("obstore", "s3fs")


def key_of(name: str) -> Key:
    return object_key(Kind.EC, NAMESPACE, name)


def tensor_of(name: str) -> Tensor:
    """The tensor that is stored under `name`; each name has another one."""
    shape = SHAPES.get(name, (16, 64))
    dice = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=dice)


@dataclass
class World:
    """A bad S3 server with good objects, and engines that use one client library."""

    road: str
    server: BadS3
    folder: Path
    good: dict[str, Stored] = field(default_factory=dict)
    """The objects in the bucket when a test begins."""
    _staging: Staging = field(default_factory=lambda: Staging(torch.device("cpu"), 1 << 28))
    _numbers: Iterator[int] = field(default_factory=count)

    def fill(self) -> None:
        with self.engine() as engine:
            self.start_up(engine)
            assert {done.outcome for done in self.save(engine, *SHAPES)} == {Outcome.OK}
        self.good = dict(self.server.objects)

    def begin(self) -> None:
        """Reset the server: no faults, and the objects of `good`."""
        self.server.faults = {}
        self.server.objects = dict(self.good)
        self.server.deleted = set()

    @contextmanager
    def engine(self) -> Iterator[TransferEngine]:
        """An engine with a host cache of its own; at the end `close` must return."""
        engine = TransferEngine(self._config(), PATH)
        try:
            yield engine
        finally:
            closing = threading.Thread(target=engine.close, args=(IO_TIMEOUT_S,), daemon=True)
            closing.start()
            closing.join(HANGS_S)
            assert not closing.is_alive(), "close() hangs"

    def _config(self) -> EncoderConfig:
        options: dict[str, Any] = self.server.storage_options
        if self.road == "s3fs":
            options["s3_additional_kwargs"] = {}
        return EncoderConfig(
            url=f"s3://{BUCKET}/cache",
            storage_options=options,
            host_cache_dir=f"{self.folder}/host-{next(self._numbers)}",
            host_cache_bytes=1 << 28,
            io_timeout_s=IO_TIMEOUT_S,
        )

    def new_name(self) -> str:
        return f"new {next(self._numbers)}"

    def start_up(self, engine: TransferEngine) -> None:
        """Start over a working server; retry if this machine is too busy to answer in time."""

        def has_started() -> bool:
            with contextlib.suppress(ConfigError):
                engine.start_up(Record(Kind.EC, NAMESPACE, FACTS), write=True)
                return True
            return False

        wait_until(has_started, "the engine does not start", HANGS_S)

    def save(self, engine: TransferEngine, *names: str) -> list[Done[Any]]:
        jobs = []
        for name in names:
            tensor = tensor_of(name)
            facts = TensorSpec("U8", tuple(tensor.shape))
            slab = self._staging.reserve(facts)
            assert slab is not None
            self._staging.copy_out(slab, tensor)
            jobs.append(Put(key_of(name), slab))
        return self._ended(engine, jobs)

    def load(self, engine: TransferEngine, *names: str) -> Counter[Outcome]:
        """Fetch objects; return the outcomes. Check the bytes of those that are loaded."""
        jobs: list[Job[Any]] = [
            Fetch(key_of(name), FETCH_TIMEOUT_S, PROLOGUE_BYTES + tensor_of(name).nbytes)
            for name in names
        ]
        wanted = {id(job): tensor_of(name) for job, name in zip(jobs, names, strict=True)}
        outcomes: Counter[Outcome] = Counter()
        for done in self._ended(engine, jobs):
            outcomes[done.outcome] += 1
            if isinstance(done.value, StoredObject):
                right = wanted[id(done.job)].numpy().tobytes()
                assert bytes(done.value.payload) == right, "wrong bytes were given out"
                done.value.release()
        return outcomes

    def look_up(self, engine: TransferEngine) -> None:
        self._ended(engine, [Lookup(tuple(map(key_of, SHAPES)), IO_TIMEOUT_S, store_only=True)])

    def _ended(self, engine: TransferEngine, jobs: Sequence[Job[Any]]) -> list[Done[Any]]:
        engine.submit(*jobs)
        ended = engine.drain(HANGS_S)
        assert not engine.in_flight, f"{engine.in_flight} jobs hang"
        assert len(ended) == len(jobs)
        return ended

    def check_no_good_object_is_deleted(self) -> None:
        lost = {name for name in SHAPES if key_of(name) in map(_plain, self.server.deleted)}
        assert not lost, f"good objects were removed: {sorted(lost)}"

    def check_heals(self, engine: TransferEngine) -> None:
        self.server.faults = {}
        wait_until(
            lambda: bool(self.load(engine, SPARE)[Outcome.OK]),
            "loads do not work again",
            HANGS_S,
        )
        name = self.new_name()
        wait_until(
            lambda: self.save(engine, name)[0].outcome is Outcome.OK,
            "saves do not work again",
            HANGS_S,
        )
        assert self.is_stored(name)

    def is_stored(self, name: str) -> bool:
        return any(_plain(key) == key_of(name) for key in tuple(self.server.objects))

    def check_stored(self, names: Sequence[str], saved: Sequence[Done[Any]]) -> None:
        """Check that each successful save is in the bucket, byte for byte."""
        ended = {done.job.key: done.outcome for done in saved if isinstance(done.job, Put)}
        assert len(ended) == len(names)
        for name in names:
            if ended[key_of(name)] is Outcome.OK:
                held = self.server.objects.get(f"cache/{key_of(name)}")
                assert held is not None, f"{name} counts as saved, and is not in the bucket"
                assert held.body[PROLOGUE_BYTES:] == tensor_of(name).numpy().tobytes()

    def replace(self, name: str, stored: Stored) -> None:
        """Damage an object in the store."""
        assert self.is_stored(name)
        self.server.objects[f"cache/{key_of(name)}"] = stored


def _plain(key: str) -> str:
    return key.removeprefix("cache/")


@contextmanager
def world(road: str, folder: Path) -> Iterator[World]:
    with bad_s3() as server:
        made = World(road, server, folder)
        made.fill()
        yield made


def check_jobs(at: World, mode: str) -> None:
    """Save, load and look up while the server has the faults of `mode`, and after it recovers."""
    at.begin()
    with at.engine() as engine:
        at.start_up(engine)
        at.server.faults = modes(mode)
        names = [at.new_name() for _ in range(6)]  # more than open a breaker
        saved = at.save(engine, *names)
        if mode not in LIES:
            at.check_stored(names, saved)
        loaded = at.load(engine, *ASKED)
        if mode.startswith("put:") and " " not in mode:
            assert loaded == {Outcome.OK: len(ASKED)}, "saves that fail cost loads"
        at.look_up(engine)
        at.load(engine, *ASKED)
        at.check_no_good_object_is_deleted()
        at.check_heals(engine)
        at.server.faults = modes(mode)
        coming = [Fetch(key_of(at.new_name()), HANGS_S, is_announced=True) for _ in range(3)]
        engine.submit(*coming)
    at.check_no_good_object_is_deleted()


def check_start(at: World, mode: str) -> None:
    """An engine starts during the faults or is refused in one line; closed, it sends no request."""
    at.begin()
    at.server.faults, said = modes(mode), PATH
    with at.engine() as engine:
        try:
            engine.start_up(Record(Kind.EC, NAMESPACE, FACTS), write=True)
        except ConfigError as exc:
            said = str(exc)
    assert PATH in said
    assert "\n" not in said
    at.check_no_good_object_is_deleted()

    def is_quiet() -> bool:
        before = len(at.server.requests)
        return not threading.Event().wait(QUIET_S) and len(at.server.requests) == before

    wait_until(is_quiet, "a closed engine still sends requests")


def check_damaged(at: World, name: str, body: bytes, etag: str = "", mode: str = "") -> None:
    """An object that is damaged in the store is not loaded, and the next save replaces it.

    `mode`: how the server fails when the damage is found.
    """
    at.begin()
    at.replace(name, Stored(body, etag) if etag else Stored.of(body))
    with at.engine() as engine:
        at.start_up(engine)
        at.server.faults = modes(mode)
        assert not at.load(engine, name)[Outcome.OK]
        at.server.faults = {}
        at.server.deleted.discard(f"cache/{key_of(name)}")
        at.check_no_good_object_is_deleted()
        assert at.save(engine, name)[0].outcome is Outcome.OK
    with at.engine() as other:
        at.start_up(other)
        loaded = at.load(other, *ASKED)
        assert loaded == {Outcome.OK: len(ASKED)}, "the damaged object was not replaced"
    at.check_no_good_object_is_deleted()
