# SPDX-License-Identifier: Apache-2.0
"""The architecture: imports point down, and light modules stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ecshare", "kvshare")
# What each group of modules may import, besides itself and the bare package `ecshare`.
STORE = {"ecshare.store"}
BELOW_VLLM = STORE | {"ecshare.transfer"}
BELOW_CONNECTORS = BELOW_VLLM | {"ecshare.plugin"}
ALLOWED = {
    "ecshare": set(),
    "ecshare.store": set(),
    "ecshare.transfer": STORE,
    "ecshare.plugin": BELOW_VLLM,
    "ecshare.encoder": BELOW_CONNECTORS,  # connector, its two halves and theirs
    "kvshare": BELOW_CONNECTORS | {"kvshare.compat", "kvshare.config"},
    "kvshare.pre_v1": BELOW_CONNECTORS | {"kvshare", "kvshare.config"},
    "kvshare.tier": BELOW_CONNECTORS | {"kvshare.compat", "kvshare.config"},
    "kvshare.compat": BELOW_CONNECTORS,
    "kvshare.config": STORE,
    "ecshare.router": STORE,
    "ecshare.testing": STORE,
    "ecshare.front": STORE | {"ecshare.encoder", "ecshare.router", "kvshare.config"},
}
ENCODER = {"connector", "scheduler", "items", "placeholders", "worker", "messages", "config"}
ENCODER |= {"facts", "metrics", "pins", "worker_totals"}
FRONT = {"cli", "doctor", "__main__"}
# Groups that must work where torch or vLLM is not installed, or is slow to import.
WITHOUT = {
    "ecshare": {"torch", "vllm", "transformers"},
    "ecshare.store": {"torch", "vllm", "transformers"},
    "ecshare.router": {"torch", "vllm", "transformers"},
    "ecshare.transfer": {"vllm", "transformers"},
    "kvshare": {"transformers"},
    "kvshare.config": {"torch", "vllm", "transformers"},
    "ecshare.front": {"torch", "vllm", "transformers"},
}


def modules_of(*packages: str) -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in packages
        for path in sorted((ROOT / package).rglob("*.py"))
    }


MODULES = modules_of(*PACKAGES)
ALL_MODULES = MODULES | modules_of("lab", "benchmarks")


def group(module: str) -> str:
    """The name in ALLOWED that `module` belongs to; a new module must be put somewhere."""
    package, _, rest = module.partition(".")
    part = rest.partition(".")[0]
    if package == "kvshare":
        return f"kvshare.{part}" if f"kvshare.{part}" in ALLOWED else "kvshare"
    if part in ENCODER:
        return "ecshare.encoder"
    if part in FRONT:
        return "ecshare.front"
    return f"{package}.{part}".rstrip(".")


def imported(module: str) -> set[str]:
    """Every module that the source of `module` names in an import, wherever it stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(ALL_MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            source = node.module or ""
            found.update(
                name if (name := f"{source}.{alias.name}") in ALL_MODULES else source
                for alias in node.names
            )
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    own = group(module)
    allowed = ALLOWED[own] | {own, "ecshare"}
    upwards = {
        name
        for name in imported(module)
        if name.partition(".")[0] in ("ecshare", "kvshare") and group(name) not in allowed
    }
    assert not upwards


@pytest.mark.parametrize("module", MODULES)
def test_a_layer_does_not_know_what_only_higher_ones_need(module: str) -> None:
    packages = {name.partition(".")[0] for name in imported(module)}
    assert not packages & WITHOUT.get(group(module), set())


def test_no_modules_import_each_other() -> None:
    """Neither within a layer nor by imports inside functions."""
    left = {name: imported(name) & ALL_MODULES.keys() - {name} for name in ALL_MODULES}
    while free := {name for name, needed in left.items() if not needed & left.keys()}:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert not left


@pytest.mark.parametrize("module", MODULES)
def test_the_product_needs_nothing_of_the_repository(module: str) -> None:
    """Of `lab`, tests and benchmarks, which the wheel does not hold."""
    packages = {name.partition(".")[0] for name in imported(module)}
    assert not packages & {"lab", "tests", "benchmarks", "examples", "scripts"}


@pytest.mark.parametrize("module", sorted(ALL_MODULES.keys() - MODULES.keys()))
def test_what_tests_and_benchmarks_share_is_in_the_lab(module: str) -> None:
    assert not {name for name in imported(module) if name.partition(".")[0] == "tests"}


@pytest.mark.parametrize("package", PACKAGES)
def test_halves_never_import_each_other(package: str) -> None:
    """They live in different processes: what they share is in messages.py."""
    assert f"{package}.worker" not in imported(f"{package}.scheduler")
    assert f"{package}.scheduler" not in imported(f"{package}.worker")


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh Python has after `statement`."""
    program = f"import sys; {statement}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
    return set(ran.stdout.decode().split())


def test_the_front_door_loads_neither_torch_nor_vllm_nor_the_router() -> None:
    front = [name for name in MODULES if group(name) == "ecshare.front"]
    assert {"ecshare.cli", "ecshare.doctor.options"} <= set(front)
    loaded = loaded_by(f"import {', '.join(name for name in front if name != 'ecshare.__main__')}")
    assert "kvshare.config" in loaded
    assert not loaded & {"torch", "vllm", "transformers", "aiohttp", "ecshare.router"}


@pytest.mark.parametrize("package", ["ecshare.store", "ecshare.router", "kvshare"])
def test_light_modules_stay_light(package: str) -> None:
    prefix = f"{package}."
    names = [name for name in MODULES if name.startswith(prefix) and package != "kvshare"]
    names = [name for name in names if not name.endswith("__main__")]
    loaded = loaded_by(f"import {', '.join([package, *names])}")
    assert not loaded & {"torch", "vllm", "transformers"}


def test_connectors_load_neither_half_and_no_storage_client() -> None:
    """vLLM imports them in its front-end process too, which needs neither."""
    halves = {f"{package}.{half}" for package in PACKAGES for half in ("scheduler", "worker")}
    loaded = loaded_by("import ecshare.connector, kvshare.connector")
    assert not loaded & (halves | {"fsspec", "s3fs", "obstore"})
