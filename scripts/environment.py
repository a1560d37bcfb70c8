# SPDX-License-Identifier: Apache-2.0
"""Python environments with vLLM's CPU build, made by pip.

Needs nothing but the standard library. vLLM's CPU build requires one exact build of torch. Plain
pip is asked for it first: some machines have an index or a folder of wheels that holds it. The
index that pip asks by default does not, so set-up then goes to PyTorch's own index of CPU builds.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
MEND = ROOT / "scripts" / "torchvision_mend.py"

TORCH = "torch==2.13.0+cpu"
# As on https://pytorch.org/get-started/locally/ for Linux, pip and CPU.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM works without them; CUDA builds beside torch's CPU build do not load, and then transformers
# does not either.
UNNEEDED = ("torchaudio", "torchcodec")
# Compiled by all cores at once. Else each of the first engines, which start together, compiles for
# half a minute what the others compile too.
LARGE = ("torch", "transformers", "vllm")
# Older ones, as of Python 3.11, take 20 s longer to compare the files of an index with what fits.
PIP = "pip>=25"
NEEDED_GB = 6
"""Free disk space to ask for: the environment has 4 GB, and pip unpacks wheels beside it."""
SIGN_OF_LIFE_S = 20

_NO_SPACE = "No space left on device"
_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|Read timed out|ProxyError"
    r"|SSLError|Connection refused|Network is unreachable|Could not fetch URL"
)
_NOT_FOUND = re.compile(r"No matching distribution found for (\S+)")


class StepFailed(Exception):
    """A step of making an environment failed; the message is one sentence with the fix."""


@dataclass(frozen=True)
class Environment:
    """An environment in `folder` with torch's CPU build and `requirements`, as pip takes them."""

    folder: Path
    requirements: tuple[str, ...]
    log: Path
    """pip's output is written here."""
    constraints: Path | None = None
    """A file of exact versions, for pip's --constraint; None: the newest that fit."""

    @property
    def python(self) -> Path:
        """Return the interpreter of the environment."""
        return self.folder / "bin" / "python"

    def set_up(self) -> None:
        """Make the environment, unless nothing changed since it was last made.

        Raises:
            StepFailed: the details are in `log`.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        stamp = self.folder / "ecshare-setup"
        with self.log.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # `make demo` and `make test` may start together
            wanted = self._fingerprint()
            if stamp.exists() and stamp.read_text() == wanted:
                return
            print(f"Setting up {os.path.relpath(self.folder, ROOT)} (once)", flush=True)
            self.log.write_text("")
            stamp.unlink(missing_ok=True)
            self._install()
            stamp.write_text(wanted)

    def _fingerprint(self) -> str:
        """Return all that the environment depends on: if it is unchanged, so is the environment."""
        facts = hashlib.sha256(f"{sys.version} {self.requirements} {self.folder}".encode())
        files = [ROOT / "pyproject.toml", Path(__file__), MEND]
        for path in files + ([self.constraints] if self.constraints else []):
            facts.update(path.read_bytes())
        return facts.hexdigest()

    def _install(self) -> None:
        """Run every step. Each may be repeated, so an interrupted set-up is simply run again."""
        if not self.python.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._check_room()
            self._run("making the environment", sys.executable, "-m", "venv", self.folder)
            with suppress(StepFailed):  # an older one is only slower
                self._pip("updating pip", PIP)
        index = self._install_torch()
        self._pip(
            "installing vLLM and the rest (about two minutes)", *self.requirements, index=index
        )
        packages = self._packages()
        large = [packages / each for each in LARGE if (packages / each).is_dir()]
        with suppress(StepFailed):  # torch has a file that only newer Pythons can read
            compiles = ("-m", "compileall", "-q", "-j", "0")
            self._run(f"compiling {', '.join(LARGE)}", self.python, *compiles, *large)
        self._mend()

    def _packages(self) -> Path:
        """Return the folder of installed packages."""
        return next((self.folder / "lib").glob("python*/site-packages"))

    def _check_room(self) -> None:
        free_gb = shutil.disk_usage(self.folder.parent).free / 1e9
        if free_gb < NEEDED_GB:
            where = os.path.relpath(self.folder, ROOT)
            raise StepFailed(
                f"{where} needs {NEEDED_GB} GB of disk space and {free_gb:.1f} GB are free: "
                "free some, or clone to a larger disk"
            )

    def _install_torch(self) -> str:
        """Install torch; return the further index that it came from, "" if plain pip has it.

        vLLM requires torchvision and torchaudio too. pip is given that index for them as well, and
        prefers its builds: of one version, 0.28.0+cpu counts as newer than 0.28.0.
        """
        index = os.environ.get("ECSHARE_TORCH_INDEX", "")
        if not index:
            try:
                self._pip(f"installing {TORCH}", TORCH)
            except StepFailed:
                if _NO_SPACE in self.log.read_text():
                    raise
                index = TORCH_INDEX
                print(
                    f"  plain pip finds no {TORCH}: taking it from {index}"
                    " (ECSHARE_TORCH_INDEX names another)",
                    flush=True,
                )
            else:
                return ""
        self._pip(f"installing {TORCH} from {index}", TORCH, index=index)
        return index

    def _mend(self) -> None:
        """Make a torchvision of the wrong kind importable; remove what vLLM can do without."""
        if not self._imports("torchvision"):
            packages = self._packages()
            shutil.copy(MEND, packages)
            (packages / f"{MEND.stem}.pth").write_text(f"import {MEND.stem}\n")
            if not self._imports("torchvision"):
                raise StepFailed(
                    "torchvision cannot be imported beside torch's CPU build: "
                    "remove the environment with `make clean` and run this again"
                )
            print(
                "  torchvision is a CUDA build next to torch's CPU build: mended with a .pth file"
            )
        broken = [each for each in UNNEEDED if self._has(each) and not self._imports(each)]
        if broken:
            what = f"removing {' and '.join(broken)}: CUDA builds, not needed"
            self._run(what, self.python, "-m", "pip", "uninstall", "-y", *broken)

    def _pip(self, what: str, *requirements: str, index: str = "") -> None:
        """Have pip install `requirements`, also from `index` if there is one.

        Python compiles what is imported, once. pip would compile all, of which little is, on one
        core; see LARGE for the rest.
        """
        extra = ("--extra-index-url", index) if index else ()
        pinned = ("--constraint", self.constraints) if self.constraints else ()
        quiet = ("--disable-pip-version-check", "--no-input")
        pip = (self.python, "-m", "pip", "install", "--no-compile")
        self._run(what, *pip, *requirements, *pinned, *extra, *quiet)

    def _run(self, what: str, *command: str | Path) -> None:
        """Run `command` with its output in the log, and show that time passes."""
        print(f"  {what} ...", flush=True)
        started_s = time.monotonic()
        with self.log.open("a") as log:
            print(f"\n== {what}", file=log, flush=True)
            begins_at = log.tell()
            process = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT
            )
            try:
                while True:
                    try:
                        status = process.wait(SIGN_OF_LIFE_S)
                        break
                    except subprocess.TimeoutExpired:
                        print(f"    {time.monotonic() - started_s:.0f} s", flush=True)
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if status != 0:
            with self.log.open("rb") as log_bytes:
                log_bytes.seek(begins_at)
                output = log_bytes.read().decode(errors="replace")
            raise StepFailed(_explained(what, output))

    def _imports(self, module: str) -> bool:
        """Return whether the environment can import `module`; its error goes to the log."""
        with self.log.open("a") as log:
            command = [str(self.python), "-W", "ignore", "-c", f"import {module}"]
            return subprocess.run(command, stdout=log, stderr=log, check=False).returncode == 0

    def _has(self, module: str) -> bool:
        """Return whether `module` is installed, importable or not."""
        look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return subprocess.run([self.python, "-c", look], check=False).returncode == 0


def _explained(what: str, output: str) -> str:
    """Return one sentence with the fix for a step that failed with this `output`."""
    if _NO_SPACE in output:
        return (
            f"{what}: the disk is full; about {NEEDED_GB} GB are needed here, "
            "and some in the folder for temporary files (TMPDIR)"
        )
    if "ensurepip is not" in output:
        return (
            f"{what}: this Python comes without venv; install it "
            "(on Debian and Ubuntu: apt install python3-venv)"
        )
    if _NO_NETWORK.search(output):
        return (
            f"{what}: a package index cannot be reached; check the network, and pip's own "
            "settings for proxies, certificates and indexes (pip config list)"
        )
    if missing := _NOT_FOUND.search(output):
        here = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
        fix = "; ECSHARE_TORCH_INDEX names another index of CPU builds" if TORCH in output else ""
        return f"{what}: no package index has {missing[1]} for {here}{fix}"
    return f"{what} failed"
