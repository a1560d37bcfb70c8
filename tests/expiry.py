# SPDX-License-Identifier: Apache-2.0
"""An expiry rule on a store in a folder, and engines that renew their manifests all the time."""

from pathlib import Path

import pytest

from ecshare.transfer.upkeep import renewal
from tests.waiting import wait_until


def renew_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines that start from now on renew their manifests and marks every few ms."""
    monkeypatch.setattr(renewal, "RENEWAL_S", 0.02)
    monkeypatch.setattr(renewal, "RETRY_S", 0.02)


def expire(store: Path) -> list[Path]:
    """Remove all manifests and size marks, at least one; return their paths."""
    paths = [path for name in ("manifests", "sizes") for path in store.glob(f"*/2/{name}/**/*")]
    # Files that are being written have names with a leading dot.
    found = [path for path in paths if path.is_file() and not path.name.startswith(".")]
    assert found
    for path in found:
        path.unlink()
    return found


def wait_until_there(paths: list[Path]) -> None:
    """Wait until all paths exist again."""
    wait_until(lambda: all(path.exists() for path in paths))
