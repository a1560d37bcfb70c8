# SPDX-License-Identifier: Apache-2.0
"""Record the system calls that a connector's hooks make.

Python's audit events report every `open`, `mkdir`, `connect`... of Python code, in any library.
`os.stat` and its like have no event, so they are wrapped. Calls of clients in C or Rust are not
seen: the time of each hook is recorded too, for the reader to judge.
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
    """Whether this thread is audited."""

    is_on: bool = False


_audited = _Audited()
_install_once = threading.Lock()
_installed: list[bool] = []


@contextlib.contextmanager
def auditing() -> Iterator[None]:
    """Record the system calls that hooks make on this thread."""
    with _install_once:
        if not _installed:
            sys.addaudithook(_on_event)  # cannot be removed
            _installed.append(True)
    originals = {name: getattr(os, name) for name in _UNAUDITED}
    for name, original in originals.items():
        setattr(os, name, _recorded(f"os.{name}", original))
    _audited.is_on = True
    try:
        yield
    finally:
        _audited.is_on = False
        for name, original in originals.items():
            setattr(os, name, original)


def _recorded(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _on_event(event, args)
        return function(*args, **kwargs)

    return call


def _on_event(event: str, _: Any) -> None:
    if _audited.is_on and current.log is not None and event.startswith(_EVENTS):
        current.log.io.add(f"{current.hook}: {event}")
