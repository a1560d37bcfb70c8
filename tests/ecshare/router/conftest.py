# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests of the router."""

from collections.abc import AsyncIterator

import pytest

from ecshare.router.fleet import client
from ecshare.router.media import fetcher
from ecshare.router.stages import plan
from tests.ecshare.router.fake_engine import Fleet, fleet


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a crowded machine the test's own process may stand still for longer than a router waits
    for a connection; the engine would count as down."""
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 60.0)
    monkeypatch.setattr(fetcher, "CONNECT_TIMEOUT_S", 60.0)


@pytest.fixture
def short_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """D gets also a short request while P computes, if P is idle."""
    monkeypatch.setattr(plan, "STREAMED_TOKENS", 0)


@pytest.fixture
async def f() -> AsyncIterator[Fleet]:
    """A router over one engine of each stage."""
    async with fleet() as made:
        yield made
