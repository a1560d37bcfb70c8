# SPDX-License-Identifier: Apache-2.0
"""The fleet of most tests of telemetry, and a browser."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.ecshare.router.fake_engine import Fleet, fleet
from tests.ecshare.router.telemetry.browser import CHROMIUM, Tab, browser


@pytest.fixture
async def f() -> AsyncIterator[Fleet]:
    """A router with an E, a P and a D."""
    async with fleet() as f:
        yield f


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    async with browser(tmp_path / "profile") as tab:
        yield tab
