# SPDX-License-Identifier: Apache-2.0
"""Which system calls a connector's hooks make.

Python's audit events tell of every `open`, `mkdir`, `connect`... that Python code makes, by
whatever library; `os.stat` has no event, so that is counted by name. Clients in C or Rust are not
seen: the time a hook took is recorded too, for the reader to judge.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from lab.vllm_loop.hooks import current

_EVENTS = ("open", "os.", "socket.", "subprocess.", "shutil.", "time.sleep", "fcntl.")
_UNAUDITED = ("stat", "lstat", "access")


class _Audited(threading.local):
    """Whether this thread is."""

    is_on: bool = False


_audited = _Audited()
_install_once = threading.Lock()
_installed: list[bool] = []


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
    _audited.is_on = True
    try:
        yield
    finally:
        _audited.is_on = False
        for name, original in originals.items():
            setattr(os, name, original)


def _noted(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _on_event(event, args)
        return function(*args, **kwargs)

    return call


def _on_event(event: str, _: Any) -> None:
    if _audited.is_on and current.log is not None and event.startswith(_EVENTS):
        current.log.io.add(f"{current.hook}: {event}")
