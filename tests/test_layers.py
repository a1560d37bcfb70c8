# SPDX-License-Identifier: Apache-2.0
"""The architecture: imports point down, light modules stay light, and no class owns too much."""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ecshare", "kvshare")
# What each room of modules may import, besides itself and the bare package `ecshare`. A module
# belongs to the room with the longest prefix of its name.
STORE = {"ecshare.store"} | {f"ecshare.store.{room}" for room in ("cloud", "folder", "fsspec")}
STORE |= {"ecshare.store.hostcache"}
UPKEEP = STORE | {"ecshare.upkeep"}
TRANSFER = {"ecshare.transfer", "ecshare.transfer.jobs"}
TRANSFER |= {f"ecshare.transfer.{room}" for room in ("announced", "client", "device", "upkeep")}
BELOW_VLLM = UPKEEP | TRANSFER
BELOW_CONNECTORS = BELOW_VLLM | {"ecshare.plugin"}
BELOW_HALVES = BELOW_CONNECTORS | {
    "kvshare.chunks",
    "kvshare.compat",
    "kvshare.config",
    "kvshare.messages",
}
ROUTER_LEAVES = {f"ecshare.router.{name}" for name in ("reuse", "siblings", "types")}
BELOW_FLEET = ROUTER_LEAVES | {f"ecshare.router.{room}" for room in ("api", "http", "options")}
ROUTER = BELOW_FLEET | {
    f"ecshare.router.{room}" for room in ("fleet", "media", "stages", "telemetry")
}
ALLOWED = {
    "ecshare": set(),
    "ecshare.store": STORE,
    "ecshare.store.cloud": {"ecshare.store"},
    "ecshare.store.folder": {"ecshare.store"},
    "ecshare.store.fsspec": {"ecshare.store"},
    "ecshare.store.hostcache": {"ecshare.store"},
    "ecshare.upkeep": STORE,
    "ecshare.transfer": BELOW_VLLM,
    "ecshare.transfer.announced": STORE | {"ecshare.transfer.client"},
    "ecshare.transfer.client": STORE,
    "ecshare.transfer.device": STORE,
    "ecshare.transfer.jobs": STORE | {"ecshare.transfer.device"},
    "ecshare.transfer.upkeep": UPKEEP
    | {"ecshare.transfer.client", "ecshare.transfer.device", "ecshare.transfer.jobs"},
    "ecshare.plugin": BELOW_VLLM,
    "ecshare.encoder": BELOW_CONNECTORS
    | {f"ecshare.encoder.{name}" for name in ("config", "scheduler", "worker")},
    "ecshare.encoder.scheduler": BELOW_CONNECTORS | {"ecshare.encoder", "ecshare.encoder.config"},
    "ecshare.encoder.worker": BELOW_CONNECTORS | {"ecshare.encoder", "ecshare.encoder.config"},
    "ecshare.encoder.config": STORE,
    "ecshare.connector": {"ecshare.encoder"},
    "kvshare": BELOW_HALVES | {"kvshare.scheduler", "kvshare.worker"},
    "kvshare.scheduler": BELOW_HALVES,
    "kvshare.worker": BELOW_HALVES,
    "kvshare.messages": BELOW_CONNECTORS | {"kvshare.chunks"},
    "kvshare.chunks": BELOW_CONNECTORS | {"kvshare.compat", "kvshare.config"},
    "kvshare.pre_v1": BELOW_CONNECTORS | {"kvshare.chunks", "kvshare.config"},
    "kvshare.tier": BELOW_CONNECTORS | {"kvshare.compat", "kvshare.config"},
    "kvshare.compat": BELOW_CONNECTORS,
    "kvshare.config": STORE,
    "ecshare.router": STORE | ROUTER,
    "ecshare.router.telemetry": STORE | ROUTER - {"ecshare.router.stages"},
    "ecshare.router.stages": STORE | ROUTER - {"ecshare.router.telemetry"},
    "ecshare.router.fleet": STORE | BELOW_FLEET,
    "ecshare.router.media": STORE | BELOW_FLEET,
    "ecshare.router.http": STORE | BELOW_FLEET,
    "ecshare.router.api": STORE | ROUTER_LEAVES,
    "ecshare.router.options": STORE | ROUTER_LEAVES,
    "ecshare.router.types": set(),
    "ecshare.router.reuse": {"ecshare.router.siblings"},
    "ecshare.router.siblings": set(),
    "ecshare.testing": STORE,
    "ecshare.cli": STORE | {"ecshare.commands", "ecshare.doctor", "ecshare.router"},
    "ecshare.warm": UPKEEP | ROUTER | {"ecshare.router"},
    "ecshare.commands": UPKEEP
    | {"ecshare.doctor", "ecshare.router", "ecshare.router.options"}
    | {"ecshare.transfer.client", "ecshare.warm"},
    "ecshare.doctor": STORE | {"ecshare.encoder.config", "kvshare.config"},
    "ecshare.__main__": {"ecshare.cli"},
}
FRONT = ("ecshare.cli", "ecshare.commands", "ecshare.doctor", "ecshare.__main__")
# Rooms that must work without torch or vLLM, or must be fast to import.
LIGHT = {"torch", "vllm", "transformers"}
WITHOUT = {
    "ecshare.store": LIGHT,
    "ecshare.upkeep": LIGHT,
    "ecshare.router": LIGHT,
    "ecshare.warm": LIGHT,
    "ecshare.transfer": {"vllm", "transformers"},
    "ecshare.encoder.config": LIGHT,
    "kvshare": {"transformers"},
    "kvshare.config": LIGHT,
} | dict.fromkeys(FRONT, LIGHT)

MOST_FIELDS = 12
# What still has more. Such a class has parts that own something: divide it, and add none.
WITH_MORE_FIELDS = {
    "ecshare.encoder.worker.EncoderWorker",
    "kvshare.worker.blocks.BlockCaches",
}


def modules_of(*packages: str) -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in packages
        for path in sorted((ROOT / package).rglob("*.py"))
    }


MODULES = modules_of(*PACKAGES)
ALL_MODULES = MODULES | modules_of("lab", "benchmarks")


def room(module: str, rooms: Iterable[str] = ALLOWED) -> str:
    """Return the room of `module`, "" if it has none."""
    own = [name for name in rooms if f"{module}.".startswith(f"{name}.")]
    return max(own, key=len, default="")


def imported(module: str) -> set[str]:
    """Return every module that the source of `module` imports, also inside functions."""
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


def test_imports_point_down() -> None:
    upwards = {
        (module, name)
        for module in MODULES
        for name in imported(module)
        if name.partition(".")[0] in PACKAGES
        and room(name) not in ALLOWED[room(module)] | {room(module), "ecshare"}
    }
    assert not upwards


def test_every_module_belongs_to_a_package_with_rules() -> None:
    """Only the bare package is in the room `ecshare`: a new module needs a room."""
    assert [name for name in MODULES if room(name) in ("ecshare", "")] == ["ecshare"]


def test_light_packages_do_not_import_heavy_ones() -> None:
    heavy = {
        (module, package)
        for module in MODULES
        for package in {name.partition(".")[0] for name in imported(module)}
        if package in WITHOUT.get(room(module, WITHOUT), set())
    }
    assert not heavy


def test_modules_have_no_import_cycles() -> None:
    """This includes cycles within a layer and imports inside functions."""
    left = {name: imported(name) & ALL_MODULES.keys() - {name} for name in ALL_MODULES}
    while free := {name for name, needed in left.items() if not needed & left.keys()}:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert not left


def test_product_imports_nothing_outside_the_wheel() -> None:
    """The wheel holds neither `lab`, tests nor benchmarks."""
    others = {"lab", "tests", "benchmarks", "examples", "scripts"}
    packages = {name: {each.partition(".")[0] for each in imported(name)} for name in MODULES}
    assert not {name for name in MODULES if packages[name] & others}


def test_lab_and_benchmarks_do_not_import_tests() -> None:
    others = ALL_MODULES.keys() - MODULES.keys()
    assert not {
        (module, name)
        for module in others
        for name in imported(module)
        if name.partition(".")[0] == "tests"
    }


def test_scheduler_and_worker_halves_never_import_each_other() -> None:
    """They run in different processes. What they share is in messages.py."""
    for package in ("ecshare.encoder", "kvshare"):
        scheduler, worker = f"{package}.scheduler", f"{package}.worker"
        assert {room(name) for name in MODULES} >= {scheduler, worker}
        assert worker not in ALLOWED[scheduler]
        assert scheduler not in ALLOWED[worker]


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a new Python process has loaded after `statement`."""
    program = f"import sys; {statement}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
    return set(ran.stdout.decode().split())


def test_cli_and_doctor_load_neither_torch_vllm_nor_router() -> None:
    front = [name for name in MODULES if room(name) in FRONT]
    assert {"ecshare.cli", "ecshare.doctor.targets"} <= set(front)
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
    """vLLM imports connectors in its front-end process too, which needs neither."""
    loaded = loaded_by("import ecshare.connector, kvshare.connector")
    assert not {name for name in loaded if ".scheduler" in room(name) or ".worker" in room(name)}
    assert not loaded & {"fsspec", "s3fs", "obstore"}


def fields(kind: ast.ClassDef) -> set[str]:
    """The names of all fields that a class sets on its objects."""
    return {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def test_no_class_has_too_many_fields() -> None:
    """Who reads a method must know what all of them mean."""
    many = {
        f"{module}.{node.name}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and len(fields(node)) > MOST_FIELDS
    }
    assert many == WITH_MORE_FIELDS
