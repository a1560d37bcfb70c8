# SPDX-License-Identifier: Apache-2.0
"""An expiry rule at work on a store in a folder, and engines whose hours are moments."""

from pathlib import Path

import pytest

from ecshare.transfer.upkeep import renewal
from tests.waiting import wait_until


def renew_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines that start from now on renew what they leave beside their objects."""
    monkeypatch.setattr(renewal, "RENEWAL_S", 0.02)
    monkeypatch.setattr(renewal, "RETRY_S", 0.02)


def expire(store: Path) -> list[Path]:
    """Remove all manifests and size marks, of which there are some; return their paths."""
    paths = [path for name in ("manifests", "sizes") for path in store.glob(f"*/2/{name}/**/*")]
    # Names that begin with a dot are of files that are being written.
    found = [path for path in paths if path.is_file() and not path.name.startswith(".")]
    assert found
    for path in found:
        path.unlink()
    return found


def wait_until_there(paths: list[Path]) -> None:
    """Wait until somebody has written all of them."""
    wait_until(lambda: all(path.exists() for path in paths))
