# SPDX-License-Identifier: Apache-2.0
"""What `make release` refuses. `make nightly` rehearses a whole release."""

import io
import runpy
import tarfile
import zipfile
from pathlib import Path

import pytest

from ecshare import __version__

RELEASE = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "release.py"))
LICENSE: str = RELEASE["LICENSE"]
ReleaseFailed: type[Exception] = RELEASE["ReleaseFailed"]
notes, check_contents, check_equal = (
    RELEASE[name] for name in ("notes", "check_contents", "check_equal")
)

HEADING = f"{__version__} - 2026-11-27"
INFO = f"ecshare-{__version__}.dist-info/METADATA"
TOP = f"ecshare-{__version__}"


def test_notes_are_the_section_of_this_version() -> None:
    log = f"# Changes\n\n## {HEADING}\n\n### Added\n\n- this\n\n## 0.0.1 - 2025-01-01\n\n- old\n"
    assert notes(log) == "### Added\n\n- this\n"
    assert notes(log.replace(HEADING, "Unreleased"), "Unreleased") == "### Added\n\n- this\n"


@pytest.mark.parametrize(
    ("log", "heading", "said"),
    [
        ("# Changes\n\n## Unreleased\n\n- this\n", "", "'Unreleased': call that section"),
        (f"# Changes\n\n## {__version__}\n\n- this\n", "", "YEAR-MONTH-DAY"),
        (f"# Changes\n\n## {HEADING}\n\n## 0.0.1 - 2025-01-01\n\n- old\n", "", "says nothing"),
        (f"# Changes\n\n## {HEADING}\n\n- this\n", "Unreleased", "call that section"),
        ("# Changes\n", "", "begins with ''"),
    ],
)
def test_change_log_without_this_version_is_refused(log: str, heading: str, said: str) -> None:
    with pytest.raises(ReleaseFailed, match=said):
        notes(log, heading)


def packed(
    folder: Path, wheel: dict[str, str] | None = None, sdist: tuple[str, ...] = ()
) -> tuple[Path, Path]:
    """Write a wheel and an sdist with these files besides some of ours."""
    paths = folder / "a.whl", folder / "a.tar.gz"
    with zipfile.ZipFile(paths[0], "w") as files:
        ours = {"ecshare/a.py": LICENSE, "kvshare/py.typed": "", INFO: "Metadata-Version: 2.4\n"}
        for name, text in {**ours, **(wheel or {})}.items():
            files.writestr(name, text)
    with tarfile.open(paths[1], "w:gz") as tar:
        for name in (f"{TOP}/ecshare/a.py", f"{TOP}/LICENSE", *sdist):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    return paths


def test_our_own_files_alone_are_released(tmp_path: Path) -> None:
    check_contents(*packed(tmp_path))


@pytest.mark.parametrize("name", ["lab/a.py", "ecshare_vendored/a.py", "a.py", "../a.py"])
def test_wheel_with_another_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ReleaseFailed, match=name):
        check_contents(*packed(tmp_path, {name: LICENSE}))


def test_source_of_another_licence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseFailed, match="ecshare/b.py does not begin"):
        check_contents(*packed(tmp_path, {"ecshare/b.py": "# SPDX-License-Identifier: MIT\n"}))


@pytest.mark.parametrize("name", [f"{TOP}/tests/a.py", f"{TOP}/.env", "ecshare/a.py"])
def test_sdist_with_another_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ReleaseFailed, match=name):
        check_contents(*packed(tmp_path, sdist=(name,)))


def test_list_of_packages_tells_nothing_of_this_machine() -> None:
    ours = {
        "name": "a",
        "externalReferences": [{"url": "file:///here/a.whl"}, {"url": "https://a"}],
    }
    shown = RELEASE["without_places"]({"components": [ours], "version": 1})
    assert shown["components"][0]["externalReferences"] == [{"url": "https://a"}]
    assert shown["version"] == 1


def test_builds_that_differ_are_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "a").write_text("same")
    check_equal(one, other)
    (other / "b").touch()
    with pytest.raises(ReleaseFailed, match="differ in b"):
        check_equal(one, other)
    (other / "b").unlink()
    (other / "a").write_text("else")
    with pytest.raises(ReleaseFailed, match="differ in a"):
        check_equal(one, other)
