# SPDX-License-Identifier: Apache-2.0
"""`make nightly` runs every suite, even after failures, and prints one table."""

import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.nightly import gate_tries
from tests.waiting import wait_until

GOOD = "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('why')\n"
BAD = "def test_a(): pass\ndef test_b(): assert 0\n"
BROKEN = "import nothing_of_this_name\n"
# A test with a daemon in its own session that ignores SIGTERM; both process ids are written down.
HANGS = """
import os, subprocess, sys
from pathlib import Path
def test_it():
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    daemon = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    Path(__file__).with_suffix(".pids").write_text(f"{os.getpid()} {daemon.pid}")
    print("HANGS NOW", file=sys.__stderr__, flush=True)
    daemon.wait()
"""


@pytest.fixture(autouse=True)
def _plain_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable plug-ins, which these tests do not need and which take a second to load."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def nightly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    made = runpy.run_path(str(ROOT / "scripts" / "nightly.py"))
    inside: dict[str, Any] = made["run"].__globals__
    monkeypatch.setitem(inside, "LOGS", tmp_path / "logs")
    return inside


def command(folder: Path, name: str, text: str) -> tuple[str, ...]:
    """Return a pytest command that runs a test file with this text."""
    path = folder / f"test_{name}.py"
    path.write_text(text)
    options = ("-q", "-s", "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", "/dev/null")
    return (sys.executable, "-m", "pytest", *options, str(path))


def rows(text: str) -> dict[str, list[str]]:
    """Return the rows of the table by the name of the suite."""
    lines = text[text.rindex("\nsuite ") :].splitlines()[2:]
    return {line.split()[0]: re.split(r"  +", line)[1:] for line in lines}


def is_running(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_every_suite_runs_and_the_table_shows_its_outcome(
    nightly: dict[str, Any], tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    texts = {"bad": BAD, "broken": BROKEN, "empty": "", "good": GOOD}
    chosen = [nightly["Suite"](name, command(tmp_path, name, texts[name]), 300) for name in texts]
    chosen.append(nightly["Suite"]("silent", ("true",), 300))
    chosen.append(nightly["Suite"]("absent", ("/no/such/program",), 300))
    assert nightly["run_all"](chosen) == 1
    shown = capfdbinary.readouterr().out.decode()
    found = rows(shown)
    assert list(found) == ["bad", "broken", "empty", "good", "silent", "absent"]
    assert [*found["bad"][:3], found["bad"][4]] == ["1", "1", "0", "failed"]
    assert [*found["broken"][:3], found["broken"][4]] == ["0", "1", "0", "failed"]
    assert [*found["empty"][:3], found["empty"][4]] == ["0", "0", "0", "failed with status 5"]
    assert [*found["good"][:3], found["good"][4]] == ["1", "0", "1", "ok"]
    assert found["silent"][4:] == ["ran nothing", "true"]
    assert found["absent"][4].startswith("failed with status")
    assert "test_bad.py::test_b" in (tmp_path / "logs" / "bad.log").read_text()
    assert "test_bad.py::test_b" in shown, "it is shown as well as kept"


def test_nightly_succeeds_if_all_suites_pass(nightly: dict[str, Any], tmp_path: Path) -> None:
    skips = "import pytest\ndef test_it(): pytest.skip('no browser')\n"
    chosen = [
        nightly["Suite"]("good", command(tmp_path, "good", GOOD), 300),
        nightly["Suite"]("skips", command(tmp_path, "skips", skips), 300),
        nightly["Suite"]("gpu", ("echo", "gpu kit: all is skipped: no CUDA device"), 300),
    ]
    assert nightly["run_all"](chosen) == 0


def test_outcomes_are_counted_with_coloured_output(
    nightly: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    suite = nightly["Suite"]("good", command(tmp_path, "good", GOOD), 300)
    assert nightly["run"](suite).verdict == "ok"


def test_hanging_suite_is_ended_with_all_its_processes(
    nightly: dict[str, Any],
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait, limit_s = subprocess.Popen.wait, 600
    said = tmp_path / "test_hangs.pids"

    def time_is_up(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout == limit_s:
            wait_until(lambda: said.exists() and " " in said.read_text(), otherwise="it runs")
            raise subprocess.TimeoutExpired("hangs", limit_s)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", time_is_up)
    hangs = nightly["Suite"]("hangs", command(tmp_path, "hangs", HANGS), limit_s)
    after = nightly["Suite"]("after", command(tmp_path, "after", GOOD), 300)
    assert nightly["run_all"]([hangs, after]) == 1
    shown = capfdbinary.readouterr().out.decode()
    assert rows(shown)["hangs"][4] == "stopped after 10 min"
    assert rows(shown)["after"][4] == "ok"
    assert "KeyboardInterrupt" in shown, "pytest says where it was"
    processes = said.read_text().split()
    assert not any(map(is_running, map(int, processes)))


@pytest.mark.parametrize("sent", gate_tries(signal.SIGINT, signal.SIGTERM))
def test_ctrl_c_ends_the_suite_and_the_table_is_printed(
    tmp_path: Path, sent: signal.Signals
) -> None:
    chosen = [command(tmp_path, "good", GOOD), command(tmp_path, "hangs", HANGS), ("true",)]
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "import nightly\nfrom pathlib import Path\n"
        f"nightly.LOGS = Path({str(tmp_path / 'logs')!r})\n"
        f"made = [nightly.Suite(f's{{at}}', each, 300) for at, each in enumerate({chosen!r})]\n"
        "nightly.suites = lambda *_: made\n"
        "sys.exit(nightly.main([]))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as started:
        assert started.stdout is not None
        head = ""
        while "HANGS NOW" not in head:
            line = started.stdout.readline()
            assert line, head
            head += line
        started.send_signal(sent)
        found = rows(started.stdout.read())
        assert started.wait() == 130
    assert found["s0"][4] == "ok"
    assert found["s1"][4] == "interrupted"
    assert found["s2"][4] == "not run"
    processes = (tmp_path / "test_hangs.pids").read_text().split()
    assert not any(map(is_running, map(int, processes)))


def test_only_summary_lines_are_counted(nightly: dict[str, Any]) -> None:
    text = (
        "3 passed in the morning, 4 failed\n"
        "=== 2 failed, 7 passed, 1 skipped, 5 deselected, 1 error in 12.30s (0:00:12) ===\n"
        "no tests ran in 0.01s\n"
        "1 passed, 2 xfailed in 3s\n"
        "5 ok, 2 skipped, 1 FAILED\n"
    )
    assert nightly["counted"](text) == {"passed": 15, "failed": 4, "skipped": 3}


def test_every_suite_is_a_target_of_make(nightly: dict[str, Any]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = {suite.name: suite.command for suite in nightly["suites"]("7", "0.32.0 0.33.0")}
    assert {words[2] for words in made.values()} <= targets
    assert made["fuzz"][3:] == ("SEED=7",)
    assert made["matrix"][3:] == ("VLLM=0.32.0 0.33.0",)


def test_unknown_suite_is_refused_with_the_known_ones(
    nightly: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        nightly["main"](["fuzzy"])
    assert "there is no suite fuzzy; there are cases, fuzz" in capsys.readouterr().err
