# SPDX-License-Identifier: Apache-2.0
"""What a connector's hooks do: which system calls, how long, and whether they raise.

Python's audit events tell of every `open`, `mkdir`, `connect`... that Python code makes, by
whatever library; `os.stat` has no event, so that is counted by name. Clients in C or Rust are not
seen: the time a hook took is recorded too, for the reader to judge.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from time import perf_counter
from typing import Any

from lab.conformance.rules import Effect, Violation

SCHEDULER_HOOKS = (
    "ensure_cache_available",
    "has_cache_item",
    "update_state_after_alloc",
    "update_state_after_free",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "take_unavailable_requests",
    "has_pending_push_work",
    "get_ec_connector_stats",
)
WORKER_HOOKS = (
    "bind_connector_metadata",
    "clear_connector_metadata",
    "start_save_caches",
    "start_load_caches",
    "save_caches",
    "get_finished",
    "build_connector_worker_meta",
    "get_ec_connector_stats",
)
_EVENTS = ("open", "os.", "socket.", "subprocess.", "shutil.", "time.sleep", "fcntl.")
_UNAUDITED = ("stat", "lstat", "access")


@dataclass
class HookLog:
    """What the hooks of one connector object did."""

    calls: dict[str, list[float]] = field(default_factory=dict)
    """Hook -> seconds of each call."""
    io: set[str] = field(default_factory=set)
    """`hook: event`, while `auditing`."""

    def num_calls(self, hook: str) -> int:
        """How often a hook was called."""
        return len(self.calls.get(hook, ()))


class _Here(threading.local):
    """The hook that this thread is in, if it is being audited."""

    log: HookLog | None = None
    hook: str = ""
    is_audited: bool = False


_here = _Here()
_install_once = threading.Lock()
_installed: list[bool] = []


def watch(connector: Any, hooks: tuple[str, ...], log: HookLog) -> None:
    """Wrap each hook that `connector` has: an exception becomes a `Violation`."""
    for name in hooks:
        if hasattr(connector, name):
            setattr(connector, name, _watched(name, getattr(connector, name), log))


def _watched(name: str, hook: Callable[..., Any], log: HookLog) -> Callable[..., Any]:
    @wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        outer, _here.log, _here.hook = (_here.log, _here.hook), log, name
        start_s = perf_counter()
        try:
            return hook(*args, **kwargs)
        except Exception as raised:
            said = f"{type(raised).__name__}: {str(raised)[:200]}"
            raise Violation(Effect.ENGINE_DIES, f"{name} raised {said}") from raised
        finally:
            log.calls.setdefault(name, []).append(perf_counter() - start_s)
            _here.log, _here.hook = outer

    return call


@contextlib.contextmanager
def auditing() -> Iterator[None]:
    """Note the system calls that hooks make on this thread."""
    with _install_once:
        if not _installed:
            sys.addaudithook(_on_event)  # cannot be taken away again
            _installed.append(True)
    originals = {name: getattr(os, name) for name in _UNAUDITED}
    for name, original in originals.items():
        setattr(os, name, _noted(f"os.{name}", original))
    _here.is_audited = True
    try:
        yield
    finally:
        _here.is_audited = False
        for name, original in originals.items():
            setattr(os, name, original)


def _noted(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _on_event(event, args)
        return function(*args, **kwargs)

    return call


def _on_event(event: str, _: Any) -> None:
    if _here.is_audited and _here.log is not None and event.startswith(_EVENTS):
        _here.log.io.add(f"{_here.hook}: {event}")
