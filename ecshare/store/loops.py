# SPDX-License-Identifier: Apache-2.0
"""Event loops."""

import asyncio


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop: uvloop's, which takes less time, if it is installed. The router's
    extra and vLLM bring it.
    """
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
