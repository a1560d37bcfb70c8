# SPDX-License-Identifier: Apache-2.0
"""Processes that run as other users of this host. Only root can start them."""

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

OWNER, OTHER, STRANGER = 12345, 12346, 12347
GROUP = 12350

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play other users")


def as_user(uid: int, work: Callable[[], Any], groups: tuple[int, ...] = ()) -> Any:
    """Return what `work` returns, or the exception it raises, in a process of that user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        result: Any
        try:
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            result = work()
        except Exception as exc:  # noqa: BLE001 -- the caller judges it
            result = exc
        with open(writing, "wb") as pipe:
            pipe.write(pickle.dumps(result))
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        result = pickle.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    return result


@contextmanager
def open_folder() -> Iterator[Path]:
    """Make a folder like /tmp that other users can enter, unlike pytest's folders."""
    folder = Path(tempfile.mkdtemp(prefix="ecshare-test-"))
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
