# SPDX-License-Identifier: Apache-2.0
"""The router's event loop: uvloop's, or Python's own where that is not installed."""

import asyncio
import sys

import pytest

from ecshare.router.loop import run


def loop_of_a_run() -> asyncio.AbstractEventLoop:
    loops = []

    async def note() -> None:
        loops.append(asyncio.get_running_loop())

    run(note())
    return loops[0]


def test_uvloop_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(loop_of_a_run()).__module__ == "uvloop"
    monkeypatch.setitem(sys.modules, "uvloop", None)  # as if it were not
    assert type(loop_of_a_run()).__module__.startswith("asyncio.")
