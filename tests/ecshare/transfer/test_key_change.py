# SPDX-License-Identifier: Apache-2.0
"""Engines while their integrity key is changed: what each step finds, and what the last one loses.

Each engine has a host cache of its own, so that it reads the store.
"""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from ecshare.plugin.model_facts import Namespace
from ecshare.plugin.start import start_with_namespace
from ecshare.store.config import StoreConfig
from ecshare.store.format import TensorSpec
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Kind
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Fetch, Outcome, Put, StoredObject
from tests.ecshare.transfer.test_fetch import finish

OLD = "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2"
NEW = "0b7d52a1f7e94c3c8f25c2f4d3f1a8e96b0c7d1e2f3a4b5c6d7e8f9012345678"
NAME = Integrity(OLD.encode()).name
STEPS: list[dict[str, Any]] = [
    {"integrity_key": OLD},
    {"integrity_key": OLD, "accepted_integrity_key": NEW},
    {"integrity_key": NEW, "accepted_integrity_key": OLD, "integrity_name": NAME},
    {"integrity_key": NEW, "integrity_name": NAME},
]


class Engine:
    """An engine of a fleet, at one step of the change."""

    def __init__(self, transfer: TransferEngine, namespace: Namespace) -> None:
        self.transfer = transfer
        self.namespace = namespace

    def save(self, name: str) -> None:
        slab = Staging(torch.device("cpu"), 1 << 16).reserve(TensorSpec("U8", (100,), {}))
        assert slab is not None
        slab.payload.zero_()
        assert finish(self.transfer, Put(self.namespace.key(name), slab)).outcome is Outcome.OK

    def finds(self, name: str) -> Outcome:
        done = finish(self.transfer, Fetch(self.namespace.key(name), 20))
        if isinstance(done.value, StoredObject):
            done.value.release()
        return done.outcome


@pytest.fixture
def engine_of(tmp_path: Path) -> Iterator[Callable[[int], Engine]]:
    started, hosts = [], count()

    def namespace_of(integrity: str) -> Namespace:
        return Namespace.of(Kind.EC, {"model": "m", "integrity": integrity})

    def start(step: int) -> Engine:
        host = f"{tmp_path}/host{next(hosts)}"
        config = StoreConfig(url=f"{tmp_path}/store", host_cache_dir=host, **STEPS[step])
        started.append(Engine(*start_with_namespace(config, "options", namespace_of, write=True)))
        return started[-1]

    yield start
    for engine in started:
        engine.transfer.close()


@pytest.mark.parametrize("step", [0, 1, 2])
def test_engines_at_adjacent_steps_of_a_key_change_share_objects(
    engine_of: Callable[[int], Engine], step: int
) -> None:
    one, two = engine_of(step), engine_of(step + 1)
    assert one.namespace == two.namespace
    one.save("by one")
    two.save("by two")
    assert one.finds("by two") is Outcome.OK
    # Only the last step refuses what the old key has signed, and the step before it signs no more.
    assert two.finds("by one") is Outcome.OK


def test_objects_of_a_removed_key_are_misses_and_leave_the_breaker_closed(
    engine_of: Callable[[int], Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """They are intact: the breaker of a store that damages all objects stays closed."""
    old, last = engine_of(0), engine_of(3)
    names = [str(n) for n in range(8)]
    for name in names:
        old.save(name)
    last.save("new")
    for name in names:
        assert last.finds(name) is Outcome.CORRUPT
    assert last.finds("new") is Outcome.OK
    assert "failed repeatedly" not in caplog.text
    last.save("0")
    assert engine_of(3).finds("0") is Outcome.OK, "a save replaces it"
