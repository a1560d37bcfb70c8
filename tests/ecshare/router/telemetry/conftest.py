# SPDX-License-Identifier: Apache-2.0
"""A browser for the tests of the pages."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.ecshare.router.telemetry.browser import CHROMIUM, Tab, browser


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    async with browser(tmp_path / "profile") as tab:
        yield tab
