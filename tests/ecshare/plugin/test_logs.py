# SPDX-License-Identifier: Apache-2.0
"""Log lines of the packages go to vLLM's log, unless the user has configured logging."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from ecshare.plugin.logs import log_host_cache, log_sharing
from ecshare.store.config import StoreConfig
from ecshare.store.hostcache.cache import HostCache
from tests.docs.pages import ROOT

REAL = """
import contextlib
import vllm.logger
with contextlib.suppress(ImportError):  # vLLM 0.30 configures its logger on import
    from vllm.config.logging import LoggingConfig
    vllm.logger.configure_logging(LoggingConfig())
"""
# Stands in for vLLM's configuration, since importing vLLM takes ten seconds.
ALIKE = """
logging.getLogger("vllm").setLevel(logging.INFO)
logging.getLogger("vllm").addHandler(logging.StreamHandler())
logging.getLogger("vllm").propagate = False
"""
WARN = """
from ecshare.plugin.logs import log_as_vllm
log_as_vllm()
log_as_vllm()
logging.basicConfig(format='late: %(message)s')
logging.getLogger("ecshare.transfer.engine").warning("from ecshare")
logging.getLogger("kvshare.worker.worker").info("from kvshare")
"""


def output(program: str) -> list[str]:
    """Run `program` in a new process; return the log lines of our packages."""
    command = [sys.executable, "-c", "import logging" + program]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in (ran.stdout + ran.stderr).splitlines() if "share" in line]


def test_log_lines_appear_although_the_root_logger_is_silenced() -> None:
    silenced = "logging.getLogger().setLevel(logging.ERROR)"
    warning, info = sorted(output(REAL + silenced + WARN), key=lambda line: "kvshare" in line)
    assert "WARNING" in warning
    assert warning.endswith("from ecshare")
    assert "INFO" in info
    assert info.endswith("from kvshare")


def test_users_logging_configuration_is_kept() -> None:
    of_root = ALIKE + "logging.basicConfig(format='root: %(message)s')"
    assert output(of_root + WARN) == ["root: from ecshare", "root: from kvshare"]
    of_ours = (
        ALIKE
        + """
logging.getLogger("ecshare").addHandler(logging.StreamHandler())
logging.getLogger("ecshare").setLevel(logging.ERROR)
"""
    )
    assert output(of_ours + WARN) == ["from kvshare"]


@pytest.mark.parametrize(
    ("saves", "loads", "does"),
    [(True, True, "saves and loads"), (True, False, "saves"), (False, True, "loads")],
)
def test_engine_logs_what_it_shares_and_where(
    caplog: pytest.LogCaptureFixture, saves: bool, loads: bool, does: str
) -> None:
    caplog.set_level(logging.INFO)
    config = StoreConfig(url="s3://me:hidden@bucket/prefix")
    log_sharing("embeddings", config, "1f0c", saves=saves, loads=loads)
    (line,) = caplog.messages
    assert line == f"this engine {does} embeddings: s3://***@bucket/prefix, namespace 1f0c"


def test_engine_logs_the_limits_of_its_host_cache(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    host = HostCache(tmp_path / "host", 3 << 20)
    log_host_cache(host)
    (line,) = caplog.messages
    assert line.startswith(f"host cache {host.root}: at most 3 MiB, ")
    assert line.endswith(f" less than {host.floor_bytes >> 20} MiB free")


def test_engine_that_shares_nothing_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_sharing("KV blocks", StoreConfig(url="/folder"), "1f0c", saves=False, loads=False)
    assert caplog.messages == []


def test_readme_shows_the_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = StoreConfig(url="s3://bucket/prefix")
    log_sharing("embeddings", config, "1f0c...", saves=True, loads=True)
    assert caplog.messages[0] in (ROOT / "README.md").read_text().splitlines()
