# SPDX-License-Identifier: Apache-2.0
"""Every HTTP status from 300 to 599, for each kind of request, with each S3 client."""

import pytest

from tests.ecshare.store.test_statuses import ROADS, check_refusals, have_clients_ask_once

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("road", ROADS)
async def test_every_error_status_is_a_store_error(
    road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_clients_ask_once(monkeypatch)
    await check_refusals(road, range(300, 600))
