# SPDX-License-Identifier: Apache-2.0
"""systemd accepts the units of examples/systemd, and they start their stages."""

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecshare.router.options.arguments import parse_arguments
from tests.docs.pages import ROOT, fences
from tests.examples.scripts import Box

FOLDER = ROOT / "examples" / "systemd"
INSTALLED = "/opt/ecshare"  # where the units expect the repository
STAGES = {
    "encode": "ecshare-engine@.service",
    "prefill": "ecshare-engine@.service",
    "decode": "ecshare-engine@.service",
    "router": "ecshare-router.service",
}


def installed_unit(unit: str) -> str:
    """Return the unit's text, as if the repository were installed."""
    text = (FOLDER / unit).read_text()
    assert INSTALLED in text
    return text.replace(INSTALLED, str(ROOT))


def directives(unit: str, name: str) -> Iterator[str]:
    for line in installed_unit(unit).splitlines():
        if line.startswith(f"{name}="):
            yield line.partition("=")[2]


def settings(stage: str) -> dict[str, str]:
    """Return the settings in the files that the page prescribes, in the unit's order."""
    for_all, for_decode, for_router = fences(FOLDER / "README.md", "ini")
    files = {"all": for_all, "decode": for_decode, "router": for_router}
    found = {}
    for path in directives(STAGES[stage], "EnvironmentFile"):
        is_optional = path.startswith("-")
        name = Path(path.lstrip("-").replace("%i", stage)).stem
        assert path.lstrip("-").startswith("/etc/ecshare/")
        assert is_optional or name == "all"
        for line in files.get(name, "").splitlines():
            (word,) = shlex.split(line)
            key, _, found[key] = word.partition("=")
    return found


@pytest.mark.parametrize("unit", sorted(set(STAGES.values())))
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(unit: str, tmp_path: Path) -> None:
    copy = tmp_path / unit
    copy.write_text(installed_unit(unit))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )
    # The output covers this machine's own units as well.
    said = [line for line in verified.stderr.splitlines() if "ecshare" in line]
    assert (verified.returncode, said) == (0, [])


@pytest.mark.parametrize("stage", STAGES)
def test_a_unit_starts_its_stage(stage: str, tmp_path: Path) -> None:
    (command,) = directives(STAGES[stage], "ExecStart")
    script, *arguments = shlex.split(command.replace("%i", stage))
    assert script == str(ROOT / "examples/one_box/engine.sh")
    environment = settings(stage)
    environment.pop("PATH")
    started = Box(tmp_path).engine_sh(*arguments, **environment)
    assert started.one("--host") == "0.0.0.0"
    if stage == "router":
        parsed = parse_arguments(started.arguments[2:])
        pools = (parsed.encoders, parsed.prefillers, parsed.decoders)
        assert [len(each) for each in pools] == [1, 1, 2]
        return
    config = started.connector("ec")
    assert config is not None
    assert config["ec_connector_extra_config"] == {
        "url": "s3://my-bucket/ecshare",
        "integrity_key": "env:ECSHARE_KEY",
    }
    devices = started.environment.get("CUDA_VISIBLE_DEVICES")
    size = started.one("--tensor-parallel-size")
    assert (devices, size) == (("2,3", "2") if stage == "decode" else (None, None))
