# SPDX-License-Identifier: Apache-2.0
"""`make lint` has ShellCheck read every shell script of the repository."""

import shlex
import subprocess

from tests.docs.pages import ROOT

OURS = ("benchmarks", "deploy", "ecshare", "examples", "kvshare", "scripts", "tests")


def test_every_shell_script_is_checked() -> None:
    output = subprocess.run(
        ["make", "--no-print-directory", "-n", "lint"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (checked,) = [shlex.split(line)[1:] for line in output.splitlines() if "/shellcheck " in line]
    scripts = {path for folder in OURS for path in (ROOT / folder).rglob("*.sh")}
    assert {ROOT / path for path in checked} == {*scripts, *ROOT.glob("*.sh"), ROOT / ".ci/run"}
