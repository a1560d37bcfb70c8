# SPDX-License-Identifier: Apache-2.0
"""The fleet of most tests of HTTP."""

from collections.abc import AsyncIterator

import pytest

from tests.ecshare.router.fake_engine import Fleet, fleet


@pytest.fixture
async def f() -> AsyncIterator[Fleet]:
    """A router with one D."""
    async with fleet(0, 0) as f:
        yield f
