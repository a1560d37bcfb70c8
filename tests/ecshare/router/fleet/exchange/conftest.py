# SPDX-License-Identifier: Apache-2.0
"""The tests of the client for engines run on asyncio's own event loop and on uvloop's."""

import asyncio
from collections.abc import Callable

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
