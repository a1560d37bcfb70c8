# SPDX-License-Identifier: Apache-2.0
"""The Dockerfiles are linted, and copy what exists. No image is built."""

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY, ROOT

DOCKERFILES = sorted((DEPLOY / "images").glob("*.Dockerfile"))

every_file = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def test_dockerfiles_have_no_lint() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    ran = subprocess.run([hadolint, *DOCKERFILES], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


@every_file
def test_all_that_is_copied_exists_and_is_sent(path: Path) -> None:
    text = path.read_text()
    ignored = path.with_name(f"{path.name}.dockerignore").read_text().splitlines()
    assert "*" in ignored
    copied = [
        name
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M)
        for name in line.split()[:-1]
    ]
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored


@every_file
def test_image_is_not_root_and_says_whether_it_is_healthy(path: Path) -> None:
    text = path.read_text()
    *_, user = re.findall(r"^USER (\d+):\d+$", text, re.M)
    assert int(user) > 0
    assert "HEALTHCHECK" in text
    (extras,) = re.findall(r"\[((?:\w+,)*s3(?:,\w+)*)\]", text)
    assert set(extras.split(",")) <= {"router", "cli", "s3"}
