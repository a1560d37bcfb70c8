# SPDX-License-Identifier: Apache-2.0
"""Several processes that serve one port (`--workers`): the kernel spreads connections over them.

The first process listens for all of them and starts them. One that dies is started again, and its
socket lives on meanwhile. Only the first process listens to signals: whoever stops a service sends
them to all of its processes, and a second signal would end the requests in flight.
"""

import contextlib
import logging
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

logger = logging.getLogger("ecshare.router")

READY = b"r"
STOP = b"s"
"""The first one has the requests in flight run on for a while, a second one ends them."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_RESTART_S = 1.0
_BACKLOG = 128
_PREFIX = "ecshare-router-"
_MOST_CHARS = 90  # the path of a socket has at most 107 characters


@dataclass(frozen=True)
class Worker:
    """What one of several processes has of its own."""

    number: int
    sockets: list[socket.socket]
    """Where it takes connections."""
    folder: Path
    """For the sockets by which workers talk to each other; only accessible to this user."""
    parent: socket.socket
    """Tells STOP, or ends if the first process does. It is told READY."""


@dataclass
class _Child:
    """A worker as the first process sees it."""

    number: int
    pid: int
    channel: socket.socket
    began_s: float
    is_ready: bool = False


def listening(host: str, port: int, workers: int) -> list[list[socket.socket]]:
    """Return the sockets of each worker, which listen at all addresses of `host`.

    Raises:
        OSError: an address is taken, or cannot be had.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = dict.fromkeys((family, address) for family, _, _, _, address in found)
    with contextlib.ExitStack() as opened:
        if workers > 1:  # the workers' own sockets would share the port with any other router's
            for family, address in addresses:
                _bound(family, address, shares=False).close()
        sockets = [
            [
                opened.enter_context(_bound(family, address, shares=workers > 1))
                for family, address in addresses
            ]
            for _ in range(workers)
        ]
        for each in chain(*sockets):
            each.listen(_BACKLOG)
        opened.pop_all()
        return sockets


def _bound(family: int, address: Any, *, shares: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def run_workers(sockets: list[list[socket.socket]], on_ready: Callable[[], None]) -> Worker | int:
    """Run a worker on each of `sockets` until all have ended. No thread may run yet.

    Returns a `Worker` in each of their processes, and the exit status in the first one.

    `on_ready` is called when all of them serve for the first time. If a worker ends before it is
    ready for the first time, all are stopped.

    Raises:
        OSError: there is no place for the workers' sockets.
    """
    folder = _private_folder()
    workers = _Workers(sockets, folder, on_ready)
    try:
        return workers.run()
    finally:
        if workers.is_first:
            shutil.rmtree(folder, ignore_errors=True)


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    if len(str(folder)) <= _MOST_CHARS:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))


class _Workers:
    """The processes, as the first one sees them."""

    def __init__(
        self, sockets: list[list[socket.socket]], folder: Path, on_ready: Callable[[], None]
    ) -> None:
        self._sockets = sockets
        self._folder = folder
        self._on_ready = on_ready
        self.is_first = True
        """Whether this process is the first one, and none of the workers."""
        self._children: dict[int, _Child] = {}
        """Those that run, by number."""
        self._due_s: dict[int, float] = {}
        """When those that have died are started again."""
        self._status = 0
        self._is_stopping = False
        self._have_begun = False

    def run(self) -> Worker | int:
        with _signals() as caught, selectors.SelectSelector() as events:
            events.register(caught, selectors.EVENT_READ)
            self._due_s = dict.fromkeys(range(len(self._sockets)), 0.0)
            while self._children or self._due_s:
                for number in [each for each, due_s in self._due_s.items() if due_s <= _now_s()]:
                    del self._due_s[number]
                    worker = self._start(number, events)
                    if worker is not None:
                        return worker
                soonest_s = min(self._due_s.values(), default=None)
                patience_s = None if soonest_s is None else max(0.0, soonest_s - _now_s())
                for key, _ in events.select(patience_s):
                    if key.data is None:
                        for _ in caught.recv(100):
                            self._stop()
                    else:
                        self._read(key.data, events)
        return self._status

    def _start(self, number: int, events: selectors.BaseSelector) -> Worker | None:
        """Start a worker. Returns it in its own process."""
        ours, theirs = socket.socketpair()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for each_signal in _SIGNALS:
                    signal.signal(each_signal, signal.SIG_IGN)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if pid:
            theirs.close()
            child = self._children[number] = _Child(number, pid, ours, _now_s())
            events.register(ours, selectors.EVENT_READ, child)
            return None
        self.is_first = False
        ours.close()
        for child in self._children.values():  # they notice by it when the first process ends
            child.channel.close()
        own = self._sockets[number]
        for each in chain(*self._sockets):
            if each not in own:
                each.close()
        return Worker(number, own, self._folder, theirs)

    def _stop(self) -> None:
        self._is_stopping = True
        for each in chain(*self._sockets):  # those of a worker are closed when it has ended
            each.close()
        self._due_s.clear()
        for child in self._children.values():
            with contextlib.suppress(OSError):
                child.channel.send(STOP)

    def _read(self, child: _Child, events: selectors.BaseSelector) -> None:
        """Note that a worker is ready, or has ended."""
        try:
            told = child.channel.recv(1)
        except OSError:
            told = b""
        if told == READY:
            child.is_ready = True
            if not self._have_begun and all(
                number in self._children and self._children[number].is_ready
                for number in range(len(self._sockets))
            ):
                self._have_begun = True
                self._on_ready()
            return
        events.unregister(child.channel)
        child.channel.close()
        del self._children[child.number]
        _, code = os.waitpid(child.pid, 0)
        self._note_end(child, os.waitstatus_to_exitcode(code))

    def _note_end(self, child: _Child, status: int) -> None:
        if self._is_stopping:
            self._status = self._status or abs(status)
        elif self._have_begun:
            logger.error(
                "worker %d has ended with status %d: it is started again", child.number, status
            )
            self._due_s[child.number] = max(_now_s(), child.began_s + _RESTART_S)
        else:
            self._status = abs(status) or 1
            self._stop()


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Yield a socket that gets a byte for each signal to stop."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = {number: signal.signal(number, _note_nothing) for number in _SIGNALS}
    woken = signal.set_wakeup_fd(theirs.fileno())
    first = os.getpid()
    try:
        yield ours
    finally:
        if os.getpid() == first:  # not in a worker, where signals do nothing
            signal.set_wakeup_fd(woken)
            for number in _SIGNALS:
                signal.signal(number, before[number])
        ours.close()
        theirs.close()


def _note_nothing(number: int, frame: object) -> None:
    """Do nothing: the wakeup socket gets the signal."""


def _now_s() -> float:
    return time.monotonic()
