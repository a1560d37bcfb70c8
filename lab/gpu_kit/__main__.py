# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.gpu_kit`: check our code on this machine's GPU. Run by `make test-gpu`.

The exit status is 0 if nothing failed, 1 if a check failed, and 2 if the command line is wrong or
a package is missing. Without a GPU it plays nothing, prints one line, and exits with 0.
"""

import argparse
import importlib
import importlib.util
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NEEDED = ("numpy", "msgspec", "blake3", "xxhash", "fsspec", "prometheus_client")
# Of the router, which checks with engines start.
_NEEDED_BY_ENGINES = ("aiohttp", "httptools", "multidict", "pybase64", "pycares", "yarl")
_PARTS = ("staging", "kv", "embeddings", "memory", "steps", "engines")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lab.gpu_kit",
        description="Check staging, KV and embeddings on a GPU; engines too, if there is vLLM.",
    )
    parser.add_argument(
        "--device", default="cuda:0", metavar="NAME", help="cuda:0 (default), cuda:1, ...; or cpu"
    )
    parser.add_argument(
        "--only", nargs="+", choices=_PARTS, default=_PARTS, help="play these parts alone"
    )
    parser.add_argument(
        "--engine-argument",
        action="append",
        default=[],
        metavar="ARG",
        help="one more argument for each vLLM engine, as --engine-argument=--attention-backend=...",
    )
    return parser


def _no_device(name: str) -> str:
    """Return why device `name` cannot be used; "" if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if name == "cpu" or torch.cuda.is_available():
        return ""
    return "torch finds no CUDA device"


def _missing(parts: Sequence[str]) -> str:
    """Return how to install the packages that `parts` lack; "" if none is missing."""
    needed = [*_NEEDED]
    if "engines" in parts and importlib.util.find_spec("vllm") is not None:
        needed += _NEEDED_BY_ENGINES
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    names = " ".join(missing)
    return (
        f"missing: {names}. Run `pip install {names}`; for a machine without a package index run "
        f"`pip install --no-deps --target FOLDER {names}` elsewhere, with the same release of "
        "Python, and put FOLDER on PYTHONPATH"
    )


def _play(options: argparse.Namespace, root: Path) -> int:
    """Play the checks of the chosen parts; return how many failed."""
    import torch

    from lab.gpu_kit import vllm_names

    vllm_names.provide()
    from lab.gpu_kit.kit import Bench, play

    # Without vLLM the workers log that there are no attention layers to check.
    logging.getLogger("kvshare").setLevel(logging.ERROR)
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else options.device
    print(f"{name}, torch {torch.__version__}", flush=True)
    verdicts = []
    for part in options.only:
        if part == "engines" and not vllm_names.has_vllm():
            print("skipped  engines: needs vLLM")
            continue
        module: Any = importlib.import_module(f"lab.gpu_kit.{part}")
        for check in module.CHECKS:
            result = play(check, Bench(device, root, options.engine_argument))
            verdicts.append(result.verdict)
            print(result.line(), flush=True)
    counts = {verdict: verdicts.count(verdict) for verdict in ("ok", "skipped", "FAILED")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return counts["FAILED"]


def main() -> int:
    """Run the program; return its exit status."""
    options = _parser().parse_args()
    if why_not := _no_device(options.device):
        print(f"gpu kit: all is skipped: {why_not}")
        return 0
    if missing := _missing(options.only):
        print(f"gpu kit: {missing}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as root:
        return int(_play(options, Path(root)) > 0)


if __name__ == "__main__":
    sys.exit(main())
