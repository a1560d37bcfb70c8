# SPDX-License-Identifier: Apache-2.0
"""The patches for vLLM: with them, engines answer to embeddings and fields as they do to pixels."""

import base64
import importlib.util
import inspect
import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from vllm.multimodal.parse import MultiModalDataParser

from lab import model_cache
from lab.servers.engine_forks import EngineForks
from lab.servers.engines import ENVIRONMENT, EngineProcess, ec_argument
from tests.conftest import CACHE, LOGS, engines
from tests.engines.chat import Answer, announced, ask, counting, passed_on, picture, text, video
from tests.releases import VLLM

ROOT = Path(__file__).parents[2]
QUESTION = text("what is to be seen here, and where?")
ENCODED, LOADED = "ecshare_items/encoded", "ecshare_items/loaded"
SHOW = {"image": picture, "video": video}

pytestmark = pytest.mark.skipif(VLLM != (0, 32), reason="the patches are made for vLLM 0.32")


class Family(NamedTuple):
    patch: str
    told: dict[str, str]
    """By modality, the field that stands for the media."""
    arguments: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        return ROOT / "contrib" / "vllm" / f"{self.patch}.patch"


FAMILIES = {
    "glm4v": Family("glm4_1v", {"image": "image_grid_thw"}),
    "internvl": Family("interns1", {"image": "image_num_patches", "video": "video_num_patches"}),
    "gemma3-vl": Family(
        "gemma3_mm",
        {"image": "num_patches"},
        # Each picture also comes as two crops: so there is a number to be told.
        (
            '--mm-processor-kwargs={"do_pan_and_scan": true, "pan_and_scan_min_crop_size": 32,'
            ' "pan_and_scan_min_ratio_to_activate": 1.0, "pan_and_scan_max_num_crops": 4}',
        ),
    ),
}


def patched(folder: Path, *patches: Path) -> list[Path]:
    """Put vLLM into the folder, as links, but for the files that the patches change; return these.

    Processes that have the folder in PYTHONPATH run it.
    """
    vllm = Path(inspect.getfile(MultiModalDataParser)).parents[1]
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(vllm, folder / "vllm", copy_function=os.symlink, ignore=without)
    diffs = "\n".join(patch.read_text() for patch in patches)
    changed = [folder / name for name in re.findall(r"^\+\+\+ b/(.+)$", diffs, re.M)]
    for file in changed:
        source = file.readlink()
        file.unlink()
        shutil.copy(source, file)
    command = ["git", "apply", "--whitespace=error", *map(str, patches)]
    subprocess.run(command, cwd=folder, check=True)
    return changed


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_patched_module_declares_the_fields(family: Family, tmp_path: Path) -> None:
    (file,) = patched(tmp_path, family.file)
    name = f"vllm.model_executor.models.{family.patch}"
    assert file == tmp_path.joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"{name}_patched", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (parser,) = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
        if issubclass(value, MultiModalDataParser)
    ]
    for modality in ("image", "video"):
        told = {family.told[modality]} if modality in family.told else set()
        assert parser.placeholder_metadata_fields(modality) == told


def test_each_patch_is_run() -> None:
    found = (ROOT / "contrib" / "vllm").glob("*.patch")
    assert {family.file for family in FAMILIES.values()} == set(found)


class Fleet(NamedTuple):
    family: Family
    plain: EngineProcess
    """vLLM as it is installed."""
    encoder: EngineProcess
    consumer: EngineProcess
    store: Path

    def encode(self, item: dict[str, Any]) -> tuple[Answer, torch.Tensor]:
        """Have an item encoded and stored; return what is announced, and its embedding."""
        before = self._stored()
        encoded = ask(self.encoder, self.encoder.model, [item])
        assert encoded.status == 200, encoded.body
        (added,) = self._stored() - before
        return encoded, load_file(added)["tensor"]

    def told(self, *content: dict[str, Any], **params: Any) -> tuple[list[int], tuple[int, int]]:
        """Ask the consumer; return its tokens, and how many items it has loaded and encoded."""
        with counting(self.consumer) as gained:
            answer = ask(self.consumer, self.consumer.model, [*content, QUESTION], **params)
        return answer.tokens, (gained[LOADED], gained[ENCODED])

    def expected(self, *content: dict[str, Any]) -> list[int]:
        return ask(self.plain, self.plain.model, [*content, QUESTION]).tokens

    def _stored(self) -> set[Path]:
        return {path for path in (self.store / "ec").rglob("*") if len(path.name) == 64}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a process that runs vLLM with all patches."""
    folder = tmp_path_factory.mktemp("patched")
    patched(folder, *(family.file for family in FAMILIES.values()))
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


@pytest.fixture(scope="module")
def patched_forks(environment: dict[str, str]) -> Iterator[EngineForks]:
    """A process that has imported vLLM with all patches, to fork engines from."""
    with closing(EngineForks(LOGS / __name__, {"patched": {**ENVIRONMENT, **environment}})) as own:
        yield own


@pytest.fixture(scope="module")
def fleet(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    forks: EngineForks,
    patched_forks: EngineForks,
    environment: dict[str, str],
) -> Iterator[Fleet]:
    """A plain engine as installed, an encoder and a consumer with the patch of one family."""
    name: str = request.param
    family, root = FAMILIES[name], tmp_path_factory.mktemp(name)
    url, limits = str(root / "store"), json.dumps(dict.fromkeys(family.told, 2))
    common = (*family.arguments, f"--limit-mm-per-prompt={limits}")
    of_consumer = ("--enable-mm-embeds", "--mm-processor-cache-gb=0")
    options = {"host_cache_dir": str(root / "host"), "wait_s": 20, "save": "durable"}
    model, logs = model_cache.model(CACHE / "models", name), LOGS / f"{__name__}.{name}"
    with ExitStack() as stack:
        start = stack.enter_context(engines(logs / "installed", model, forks))
        start_patched = partial(
            stack.enter_context(engines(logs / "patched", model, patched_forks)),
            environment=environment,
        )
        fleet = (
            start("plain", *common),
            start_patched("encoder", *common, ec_argument("producer", url, **options)),
            start_patched(
                *("consumer", *common, *of_consumer, ec_argument("consumer", url, **options))
            ),
        )
        for engine in fleet:
            engine.wait_ready()
        yield Fleet(family, *fleet, root / "store")


each_medium = pytest.mark.parametrize(
    ("fleet", "modality"),
    [(name, modality) for name, family in FAMILIES.items() for modality in family.told],
    indirect=["fleet"],
    scope="module",
)


@pytest.mark.engine
@pytest.mark.models
@each_medium
def test_consumer_needs_only_the_fields(fleet: Fleet, modality: str) -> None:
    names = [f"{modality} {seed}" for seed in (1, 2)]
    shown = [SHOW[modality](seed, name) for seed, name in zip((1, 2), names, strict=True)]
    encoded = [fleet.encode(item)[0] for item in shown]
    for name, answer in zip(names, encoded, strict=True):
        metadata = answer.body["ec_transfer_params"][name]["metadata"]
        assert set(metadata) == {fleet.family.told[modality]}
    items = [announced(answer, name, modality) for name, answer in zip(names, encoded, strict=True)]
    tokens, (num_loaded, num_encoded) = fleet.told(*items, **passed_on(*encoded))
    assert (num_loaded, num_encoded) == (2, 0)
    assert tokens == fleet.expected(*shown)
    assert tokens != fleet.expected(*reversed(shown)), "the tokens do not depend on the item"


@pytest.mark.engine
@pytest.mark.models
@each_medium
def test_embeddings_may_come_in_the_request(fleet: Fleet, modality: str) -> None:
    shown = [SHOW[modality](seed, f"{modality} {seed}") for seed in (3, 4)]
    items = []
    for seed, item in zip((3, 4), shown, strict=True):
        encoded, embedding = fleet.encode(item)
        told = announced(encoded, item["uuid"], modality)
        told[told["type"]] |= {f"{modality}_embeds": as_base64(embedding)}
        # Under this name nothing is stored.
        items.append(told | {"uuid": f"{modality} {seed}, sent whole"})
    tokens, (num_loaded, _) = fleet.told(*items)
    assert num_loaded == 0
    assert tokens == fleet.expected(*shown)
    assert tokens != fleet.expected(*reversed(shown)), "the tokens do not depend on the item"


def as_base64(tensor: torch.Tensor) -> str:
    written = io.BytesIO()
    torch.save(tensor, written)
    return base64.b64encode(written.getvalue()).decode()
