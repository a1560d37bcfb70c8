# SPDX-License-Identifier: Apache-2.0
"""The tests of this folder take minutes: only `-m faults` runs them (`make test-faults`)."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.disks import SmallDisk

HERE = Path(__file__).parent
DISK_BYTES = 32 << 20


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "faults" in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.path.is_relative_to(HERE)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SmallDisk, ...]]:
    """Three separate file systems: of the store, and of the host caches of encoder and consumer."""
    root = tmp_path_factory.mktemp("disks")
    with ExitStack() as stack:
        mounted = []
        for name in ("store", "encoder", "consumer"):
            disk = SmallDisk(root / name, DISK_BYTES)
            try:
                disk.mount()
            except PermissionError as exc:
                pytest.skip(f"{exc}: `make test-faults` gets the right from a user namespace")
            stack.callback(disk.unmount)
            mounted.append(disk)
        yield tuple(mounted)
