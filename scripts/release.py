# SPDX-License-Identifier: Apache-2.0
"""Builds a release of the last commit into dist/, and checks it. Run by `make release`.

It publishes nothing, and ends at the first thing that is wrong. dist/ then holds the sdist, the
wheel, notes.md (the change log's section), sbom.json (the packages that the router and the commands
bring, in CycloneDX's format) and SHA256SUMS.

    python -m scripts.release [--rehearse] [--pythons NAMES]
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ecshare import __version__

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
# Exact versions: what hatchling writes depends on its own.
TOOLS = ("build==1.6.1", "cyclonedx-bom==7.5.0", "hatchling==1.33.0", "twine==7.0.0")
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
# What needs no engine. Engines take the rest from vLLM.
EXTRAS = "azure,cli,gcs,otel,router,s3,zstd"
LICENSE = "# SPDX-License-Identifier: Apache-2.0\n"


class ReleaseFailed(Exception):
    """Something is not as a release needs it; the message is one sentence with the fix."""


def main(argv: Sequence[str] | None = None) -> int:
    """Build and check; return the exit status: 0, or 1 with a sentence on stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="take the change log's section Unreleased, and the Pythons that are here",
    )
    parser.add_argument("--pythons", default=",".join(PYTHONS), help="to try (%(default)s)")
    options = parser.parse_args(argv)
    try:
        _release(options.pythons.split(","), is_rehearsal=options.rehearse)
    except ReleaseFailed as exc:
        print(f"release failed: {exc}", file=sys.stderr)
        return 1
    return 0


def _release(pythons: Sequence[str], *, is_rehearsal: bool) -> None:
    _check_committed()
    section = notes((ROOT / "CHANGELOG.md").read_text(), "Unreleased" if is_rehearsal else "")
    found = [name for name in pythons if _answers(name)]
    missing = [name for name in pythons if name not in found]
    if missing and not is_rehearsal:
        raise ReleaseFailed(f"there is no {', '.join(missing)} here: install it, or --rehearse")
    tools = _tools()
    print(f"Building {__version__} twice")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        _build(tools, Path(first))
        _build(tools, Path(second))
        check_equal(Path(first), Path(second))
        shutil.rmtree(DIST, ignore_errors=True)
        shutil.copytree(first, DIST)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    check_contents(wheel, sdist)
    _run("twine", tools, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    for name in found:
        print(f"Trying each extra with {name}", flush=True)
        own = {"RELEASE_WHEEL": str(wheel), "RELEASE_PYTHON": name}
        tests = ("-m", "pytest", "-q", "-m", "packaging", "-n", "2", "tests/packaging")
        print(_run(f"the wheel with {name}", Path(sys.executable), *tests, **own).splitlines()[-1])
    print("Writing the list of packages")
    _write_packages(tools, wheel)
    (DIST / "notes.md").write_text(section)
    _write_sums()
    for name in missing:
        print(f"not tried: {name}, which is not here")
    shown = ", ".join(sorted(path.name for path in DIST.iterdir()))
    print(f"{'rehearsed' if is_rehearsal else 'ready'}: dist/ has {shown}")


def _check_committed() -> None:
    changed = _said("git", "status", "--porcelain").splitlines()
    if changed:
        names = ", ".join(line[3:] for line in changed[:5])
        raise ReleaseFailed(f"not committed: {names}: a release is built from the last commit")


def notes(change_log: str, heading: str = "") -> str:
    """Return the section under `heading` of a change log; by default that of this version, whose
    heading ends with the day.

    Raises:
        ReleaseFailed: it is not the first section, or it is empty.
    """
    sections = re.split(r"^## (.+)\n", change_log, flags=re.MULTILINE)[1:]
    first, text = (sections[0], sections[1]) if sections else ("", "")
    wanted = re.escape(heading) or re.escape(__version__) + r" - \d{4}-\d\d-\d\d"
    if not re.fullmatch(wanted, first):
        raise ReleaseFailed(
            f"CHANGELOG.md begins with {first!r}: call that section '{__version__} - "
            "YEAR-MONTH-DAY', or set __version__ in ecshare/__init__.py"
        )
    if not text.strip():
        raise ReleaseFailed(f"CHANGELOG.md says nothing under {first!r}")
    return text.strip() + "\n"


def _answers(python: str) -> bool:
    """Return whether there is an interpreter of that name. A shim may be there without one."""
    if not shutil.which(python):
        return False
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def _tools() -> Path:
    """Return the Python of an environment with the tools; make it if it is not there."""
    folder = ROOT / ".cache" / "release"
    python = folder / "bin" / "python"
    if not python.exists():
        _run("making an environment for the tools", Path(sys.executable), "-m", "venv", str(folder))
    _run("installing the tools", python, "-m", "pip", "install", "--quiet", *TOOLS)
    return python


def _build(tools: Path, target: Path) -> None:
    """Build the sdist of the last commit, and the wheel from the sdist."""
    with tempfile.TemporaryDirectory() as source:
        tar = Path(source, "source.tar")
        _said("git", "archive", f"--output={tar}", "HEAD")
        with tarfile.open(tar) as files:
            files.extractall(source, filter="data")
        tar.unlink()
        at = {"SOURCE_DATE_EPOCH": _said("git", "show", "--no-patch", "--format=%ct").strip()}
        build = ("-m", "build", "--no-isolation", "--outdir", str(target), source)
        _run("building", tools, *build, **at)


def check_equal(first: Path, second: Path) -> None:
    """Raise ReleaseFailed unless both folders have the same files."""
    names = {path.name for path in (*first.iterdir(), *second.iterdir())}
    for name in sorted(names):
        one, other = first / name, second / name
        if not (one.exists() and other.exists() and one.read_bytes() == other.read_bytes()):
            raise ReleaseFailed(f"two builds of one commit differ in {name}")


def check_contents(wheel: Path, sdist: Path) -> None:
    """Check that both contain our own files alone.

    Raises:
        ReleaseFailed: a file is not ours, or a source does not begin with our licence.
    """
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            is_described = name.startswith(f"ecshare-{__version__}.dist-info/")
            if not is_described and not name.startswith(("ecshare/", "kvshare/")):
                raise ReleaseFailed(f"{wheel.name} contains {name}")
            if name.endswith(".py") and not packed.read(name).decode().startswith(LICENSE):
                raise ReleaseFailed(f"{name} does not begin with {LICENSE.strip()!r}")
    top = {"ecshare", "kvshare", "docs", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md"}
    top |= {"pyproject.toml", ".gitignore"}
    with tarfile.open(sdist) as files:
        for name in files.getnames():
            folder, _, rest = name.partition("/")
            if folder != f"ecshare-{__version__}" or rest.split("/")[0] not in top:
                raise ReleaseFailed(f"{sdist.name} contains {name}")


def _write_packages(tools: Path, wheel: Path) -> None:
    """Write what the light extras install, with versions and licences."""
    with tempfile.TemporaryDirectory() as folder:
        _run("an environment", Path(sys.executable), "-m", "venv", "--without-pip", folder)
        python = Path(folder, "bin", "python")
        pip = ("-m", "pip", "--python", str(python), "install", "--quiet")
        pinned = ("--constraint", str(ROOT / "constraints.txt"))
        _run("installing the extras", tools, *pip, f"{wheel}[{EXTRAS}]", *pinned)
        describe = ("-m", "cyclonedx_py", "environment", "--output-reproducible", str(python))
        found = json.loads(_run("cyclonedx", tools, *describe))
    (DIST / "sbom.json").write_text(json.dumps(without_places(found), indent=1) + "\n")


def without_places(bill: Any) -> Any:  # noqa: ANN401 — any JSON
    """Return a list of packages without the folders of this machine that they came from."""
    if isinstance(bill, list):
        return [without_places(each) for each in bill if "file://" not in str(_url_of(each))]
    if isinstance(bill, dict):
        return {name: without_places(value) for name, value in bill.items()}
    return bill


def _url_of(value: Any) -> Any:  # noqa: ANN401 — any JSON
    return value.get("url") if isinstance(value, dict) else None


def _write_sums() -> None:
    files = sorted(path for path in DIST.iterdir() if path.is_file())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (DIST / "SHA256SUMS").write_text("".join(lines))


def _run(what: str, python: Path, *arguments: str, **environment: str) -> str:
    """Run a Python program in the repository, and return what it said.

    Raises:
        ReleaseFailed: it failed; what it said is shown before.
    """
    ran = subprocess.run(
        [python, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        print(ran.stdout + ran.stderr, file=sys.stderr)
        raise ReleaseFailed(f"{what} failed, see above")
    return ran.stdout


def _said(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
