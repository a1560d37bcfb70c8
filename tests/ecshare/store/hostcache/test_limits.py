# SPDX-License-Identifier: Apache-2.0
"""Processes that give one folder different limits are warned."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from ecshare.plugin.logs import log_host_cache
from ecshare.store.hostcache.cache import HostCache

KIB = 1 << 10
OTHER = """
import sys, pathlib
from ecshare.store.hostcache.cache import HostCache
cache = HostCache(pathlib.Path(sys.argv[1]), 200 << 10)
print("open", flush=True)
sys.stdin.read()
"""


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_limits_of_live_processes_are_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "host"
    cache = HostCache(root, 100 * KIB)
    command = [sys.executable, "-c", OTHER, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        assert cache.other_limits() == [200 * KIB]
        log_host_cache(cache)
        (warning,) = warnings(caplog)
        assert warning.startswith(f"host_cache_bytes: it is {100 * KIB} here, and {200 * KIB} for")
        other.kill()
    assert cache.other_limits() == []


def test_equal_limits_cause_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, two = (HostCache(tmp_path / "host", 100 * KIB) for _ in range(2))
    other = HostCache(tmp_path / "host", 300 * KIB)
    assert one.other_limits() == two.other_limits() == [300 * KIB]
    assert other.other_limits() == [100 * KIB]
    del other
    log_host_cache(one)
    assert warnings(caplog) == []


def test_foreign_files_among_the_limits_are_ignored(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "host", 100 * KIB)
    limits = tmp_path / "host" / ".limits"
    (limits / "12").symlink_to("/etc/passwd")
    (limits / "13").mkdir()
    (limits / "x").touch()
    (limits / "\u0661").touch()
    assert cache.other_limits() == []
