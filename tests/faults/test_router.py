# SPDX-License-Identifier: Apache-2.0
"""Engines behind a router are killed and started again, for minutes."""

from pathlib import Path

import pytest

from tests.ecshare.router.stages.test_lost_requests import check_none_is_lost

pytestmark = pytest.mark.faults


async def test_restarting_engines_lose_no_request(tmp_path: Path) -> None:
    await check_none_is_lost(10_000, tmp_path)
