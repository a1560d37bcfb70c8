# SPDX-License-Identifier: Apache-2.0
"""Python environments with vLLM's CPU build, made by pip.

Runs on any Python >= 3.11 without anything installed. vLLM's CPU build wants one exact torch, a CPU
build; where plain pip does not find it, ECSHARE_TORCH_INDEX names the package index that has it.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
MEND = ROOT / "scripts" / "torchvision_mend.py"

TORCH = "torch==2.13.0+cpu"
# vLLM's wheel asks for them and does without; CUDA builds next to torch+cpu, they do not load,
# and then transformers does not either.
UNNEEDED = ("torchaudio", "torchcodec")
SIGN_OF_LIFE_S = 20


class StepFailed(Exception):
    """A step of making an environment went wrong; the message says which."""


@dataclass(frozen=True)
class Environment:
    """An environment in `folder` with torch's CPU build and `requirements`, as pip takes them."""

    folder: Path
    requirements: tuple[str, ...]
    log: Path
    """What pip says goes here."""

    @property
    def python(self) -> Path:
        """The program that runs in it."""
        return self.folder / "bin" / "python"

    def set_up(self) -> None:
        """Make it, unless nothing changed since it was last made.

        Raises:
            StepFailed: and then `log` says why.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        stamp = self.folder / "ecshare-setup"
        with self.log.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # `make demo` and `make test` may start together
            wanted = self._fingerprint()
            if stamp.exists() and stamp.read_text() == wanted:
                return
            print(f"Setting up {self.folder.relative_to(ROOT)} (once)", flush=True)
            self.log.write_text("")
            stamp.unlink(missing_ok=True)
            self._install()
            stamp.write_text(wanted)

    def _fingerprint(self) -> str:
        """What the environment depends on: if this is unchanged, so is the environment."""
        facts = hashlib.sha256(f"{sys.version} {self.requirements} {self.folder}".encode())
        for path in (ROOT / "pyproject.toml", Path(__file__), MEND):
            facts.update(path.read_bytes())
        return facts.hexdigest()

    def _install(self) -> None:
        """Every step; each may be repeated, so a broken-off setup is simply run again."""
        if not self.python.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            self._run("making the environment", sys.executable, "-m", "venv", self.folder)
        try:
            self._pip(f"installing {TORCH}", "install", TORCH)
        except StepFailed as failed:
            hint = "if pip did not find it, set ECSHARE_TORCH_INDEX to an index of CPU builds"
            raise StepFailed(f"{failed} ({hint} of torch)") from None
        self._pip("installing vLLM and the rest (about two minutes)", "install", *self.requirements)
        self._mend()

    def _mend(self) -> None:
        """Make a torchvision of the wrong kind importable; remove what vLLM can do without."""
        if not self._imports("torchvision"):
            packages = next((self.folder / "lib").glob("python*/site-packages"))
            shutil.copy(MEND, packages)
            (packages / f"{MEND.stem}.pth").write_text(f"import {MEND.stem}\n")
            if not self._imports("torchvision"):
                raise StepFailed("importing torchvision")
            print(
                "  torchvision is a CUDA build next to torch's CPU build: mended with a .pth file"
            )
        broken = [each for each in UNNEEDED if self._has(each) and not self._imports(each)]
        if broken:
            what = f"removing {' and '.join(broken)}: CUDA builds, not needed"
            self._pip(what, "uninstall", "-y", *broken)

    def _run(self, what: str, *command: str | Path) -> None:
        """Run `command` with its output in the log, and show that time passes."""
        print(f"  {what} ...", flush=True)
        started_s = time.monotonic()
        with self.log.open("a") as log:
            print(f"\n== {what}", file=log, flush=True)
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
            raise StepFailed(what)

    def _pip(self, what: str, *arguments: str) -> None:
        """Run pip of the environment, with the user's extra index if there is one."""
        index = os.environ.get("ECSHARE_TORCH_INDEX")
        extra = ("--extra-index-url", index) if index and arguments[0] == "install" else ()
        quiet = ("--disable-pip-version-check", "--no-input")
        self._run(what, self.python, "-m", "pip", *arguments, *extra, *quiet)

    def _imports(self, module: str) -> bool:
        """Whether `module` can be imported in the environment; its error goes to the log."""
        with self.log.open("a") as log:
            command = [str(self.python), "-W", "ignore", "-c", f"import {module}"]
            return subprocess.run(command, stdout=log, stderr=log, check=False).returncode == 0

    def _has(self, module: str) -> bool:
        """Whether `module` is there, importable or not."""
        look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return subprocess.run([self.python, "-c", look], check=False).returncode == 0
