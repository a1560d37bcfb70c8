# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of engines, their health and their models."""

import pytest

from ecshare.router.fleet import watch
from tests.ecshare.router.fake_engine import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent engines are asked for their health without much waiting."""
    monkeypatch.setattr(watch, "POLL_EVERY_S", 0.02)
