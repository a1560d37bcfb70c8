# SPDX-License-Identifier: Apache-2.0
"""Starts the transfer engine of a connector's half, or of the tier."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ecshare.plugin.model_facts import Namespace
from ecshare.store.config import StoreConfig
from ecshare.store.keys import Key
from ecshare.transfer.device.devices import device_selector
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.packing import Packing
from ecshare.transfer.upkeep.renewal import Record


def start_with_namespace(  # noqa: PLR0913 — one parameter for each property of the half
    config: StoreConfig,
    path: str,
    namespace_of: Callable[[str], Namespace],
    *,
    write: bool,
    live: bool = True,
    mark_of: Callable[[Namespace], Key | None] = lambda _: None,
) -> tuple[TransferEngine, Namespace]:
    """Return an engine whose store has answered, and the namespace of its objects.

    `path`: where the user wrote `config`. `namespace_of` takes the name of the integrity key; the
    tenant is added to its facts. `write`: this engine stores objects, so it also writes its
    manifest and the mark; see `TransferEngine.start_up`. `live`: follow the epochs of the model.
    The caller closes the engine.

    Raises:
        ConfigError: an option is wrong, or the store cannot be used; names the option and the fix.
    """
    with _opened(config, path) as engine:
        namespace = namespace_of(engine.integrity)
        if config.tenant:
            namespace = Namespace.of(namespace.kind, {**namespace.facts, "tenant": config.tenant})
        mark = mark_of(namespace)
        record = Record(namespace.kind, namespace.digest, namespace.facts, mark)
        engine.start_up(record, write=write, live=live)
    return engine, namespace


def start_engine(
    config: StoreConfig,
    path: str,
    *,
    write: bool,
    device: str | torch.device | None,
    packing: Packing | None = None,
) -> TransferEngine:
    """Return an engine whose store has answered, for a worker: its orders name the keys of objects.

    `device`: the worker's, as vLLM names it, and the calling thread's current one. `packing`: how
    objects are packed in the store.

    Raises:
        ConfigError: as `start_with_namespace`.
    """
    selector = device_selector(torch.device(device)) if device is not None else None
    with _opened(config, path, selector, packing) as engine:
        engine.probe(write=write)
    return engine


@contextmanager
def _opened(
    config: StoreConfig,
    path: str,
    on_thread_start: Callable[[], object] | None = None,
    packing: Packing | None = None,
) -> Iterator[TransferEngine]:
    """Open an engine; close it if the body fails."""
    engine = TransferEngine(config, path, packing=packing, on_thread_start=on_thread_start)
    try:
        yield engine
    except BaseException:
        engine.close()
        raise
