# SPDX-License-Identifier: Apache-2.0
"""Makes `.venv` with everything that the demo and the tests need. Run by `make setup`.

Runs on any Python >= 3.11 without anything installed. Does nothing if nothing changed since it
last succeeded. vLLM's CPU build wants one exact torch, a CPU build; where plain pip does not find
it, ECSHARE_TORCH_INDEX names the package index that has it.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "ecshare-setup"
LOG = ROOT / ".cache" / "setup.log"
MEND = ROOT / "scripts" / "torchvision_mend.py"

TORCH = "torch==2.13.0+cpu"
EXTRAS = "cpu,s3,router,dev"
# vLLM's wheel asks for them and does without; CUDA builds next to torch+cpu, they do not load,
# and then transformers does not either.
UNNEEDED = ("torchaudio", "torchcodec")
SIGN_OF_LIFE_S = 20


class StepFailed(Exception):
    """A step of the setup went wrong; the message says which."""


def fingerprint() -> str:
    """What the environment depends on: if this is unchanged, so is the environment."""
    facts = hashlib.sha256(f"{sys.version} {EXTRAS} {VENV}".encode())
    for path in (ROOT / "pyproject.toml", Path(__file__), MEND):
        facts.update(path.read_bytes())
    return facts.hexdigest()


def run(what: str, *command: str | Path) -> None:
    """Run `command` with its output in the log, and show that time passes."""
    print(f"  {what} ...", flush=True)
    started_s = time.monotonic()
    with LOG.open("a") as log:
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


def pip(what: str, *arguments: str) -> None:
    """Run pip of the new environment, with the user's extra index if there is one."""
    index = os.environ.get("ECSHARE_TORCH_INDEX")
    extra = ("--extra-index-url", index) if index and arguments[0] == "install" else ()
    quiet = ("--disable-pip-version-check", "--no-input")
    run(what, PYTHON, "-m", "pip", *arguments, *extra, *quiet)


def imports(module: str) -> bool:
    """Whether `module` can be imported in the new environment; its error goes to the log."""
    with LOG.open("a") as log:
        command = [str(PYTHON), "-W", "ignore", "-c", f"import {module}"]
        return subprocess.run(command, stdout=log, stderr=log, check=False).returncode == 0


def installed(module: str) -> bool:
    """Whether `module` is there, importable or not."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([PYTHON, "-c", look], check=False).returncode == 0


def mend() -> None:
    """Make a torchvision of the wrong kind importable, and remove what vLLM can do without."""
    if not imports("torchvision"):
        packages = next((VENV / "lib").glob("python*/site-packages"))
        shutil.copy(MEND, packages)
        (packages / f"{MEND.stem}.pth").write_text(f"import {MEND.stem}\n")
        if not imports("torchvision"):
            raise StepFailed("importing torchvision")
        print("  torchvision is a CUDA build next to torch's CPU build: mended with a .pth file")
    broken = [module for module in UNNEEDED if installed(module) and not imports(module)]
    if broken:
        pip(f"removing {' and '.join(broken)}: CUDA builds, not needed", "uninstall", "-y", *broken)


def install() -> None:
    """Every step; each may be repeated, so a broken-off setup is simply run again."""
    if not PYTHON.exists():
        shutil.rmtree(VENV, ignore_errors=True)
        run("making .venv", sys.executable, "-m", "venv", VENV)
    try:
        pip(f"installing {TORCH}", "install", TORCH)
    except StepFailed as failed:
        hint = "if pip did not find it, set ECSHARE_TORCH_INDEX to an index of CPU builds of torch"
        raise StepFailed(f"{failed} ({hint})") from None
    pip("installing vLLM and the rest (about two minutes)", "install", "-e", f".[{EXTRAS}]")
    mend()


def main() -> int:
    """Set up if needed; 0, or 1 with one sentence that names the log file."""
    if sys.version_info < (3, 11):  # noqa: UP036 - `python3` may be an older one
        print("ecshare needs Python 3.11 or later: make PYTHON=python3.11 ...", file=sys.stderr)
        return 1
    LOG.parent.mkdir(exist_ok=True)
    with (LOG.parent / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # `make demo` and `make test` may start together
        wanted = fingerprint()
        if STAMP.exists() and STAMP.read_text() == wanted:
            return 0
        print("Setting up .venv (once)", flush=True)
        LOG.write_text("")
        STAMP.unlink(missing_ok=True)
        try:
            install()
        except StepFailed as failed:
            log = LOG.relative_to(ROOT)
            print(f"setup failed: {failed}. The log is {log}", file=sys.stderr)
            return 1
        STAMP.write_text(wanted)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
