# SPDX-License-Identifier: Apache-2.0
"""KV caches of other layouts: sliding windows, latent attention, 8-bit numbers."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open

from lab import model_cache
from lab.servers.engine_forks import EngineForks
from lab.servers.engines import ON_V2, SMALL_ENGINE, EngineProcess, kv_argument
from tests.conftest import CACHE, LOGS
from tests.engines.chat import Answer, ask, complete, counting, stored_kv, text

pytestmark = pytest.mark.engine

CHUNK = 64
STORY = "Tell me a story about the sea, the wind and the stars, and of an old stone house. " * 8
PROMPTS = [f"{number} {STORY}"[:length] for number, length in enumerate((2000, 300, 40, 500))]


class Kind(NamedTuple):
    """A model and options that give a cache of one kind; the parts that a chunk is stored in."""

    family: str
    options: tuple[str, ...]
    parts: set[str]
    environment: dict[str, str] = {}
    """The environment of the engines that share KV."""


KINDS = {
    "windows": Kind("gemma3", (), {"t0of1", "t0of1-s1"}),
    "all layers alike, windows or not": Kind(
        "gemma3", ("--disable-hybrid-kv-cache-manager",), {"t0of1"}
    ),
    "windows on V2": Kind("gemma3", (), {"t0of1", "t0of1-s1"}, ON_V2),
    "8 bits": Kind("qwen2", ("--kv-cache-dtype=fp8",), {"t0of1"}),
    "windows of 8 bits": Kind("gemma3", ("--kv-cache-dtype=fp8",), {"t0of1", "t0of1-s1"}),
}
IN_THE_GATE = ("windows",)


def block_layouts(engine: EngineProcess) -> list[str]:
    """The block layouts in the engine's log, one for each layer set."""
    log = engine.log_path.read_text()
    assert "cannot check the attention back end" not in log
    return re.findall(r"checked the attention kernels: block layout ([0-9a-f]{16})\b", log)


class Fleet(NamedTuple):
    kind: Kind
    plain: EngineProcess
    first: EngineProcess
    second: EngineProcess
    root: Path
    logs: Path
    flags: tuple[str, ...]
    forks: EngineForks

    def check(self, engine: EngineProcess, prompt: str) -> Answer:
        answer = ask(engine, engine.model, [text(prompt)])
        assert answer.tokens == ask(self.plain, self.plain.model, [text(prompt)]).tokens
        stored_kv(self.root, "*")
        return answer


@pytest.fixture(scope="module")
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: EngineForks
) -> Iterator[Fleet]:
    kind: Kind = KINDS[request.param]
    root = tmp_path_factory.mktemp("layouts")
    model = model_cache.model(CACHE / "models", kind.family)
    flags = (*SMALL_ENGINE, "--block-size=32", "--limit-mm-per-prompt={}", *kind.options)
    logs = LOGS / f"{__name__}.{request.param}"
    shutil.rmtree(logs, ignore_errors=True)  # engines append to what is there

    def sharing(name: str) -> EngineProcess:
        own: dict[str, Any] = {"host_cache_dir": f"{root}/{name}-host", "chunk_tokens": CHUNK}
        kv = kv_argument("both", f"file://{root}/store", **own)
        return EngineProcess(name, model, logs, (*flags, kv), kind.environment, forks=forks)

    plain = EngineProcess("plain", model, logs, flags, forks=forks)
    first, second = sharing("first"), sharing("second")
    with ExitStack() as stack:
        for each in (plain, first, second):
            each.start_in(stack)
        for each in (plain, first, second):
            each.wait_ready()
        yield Fleet(kind, plain, first, second, root, logs, flags, forks)


# The scope makes the cases of a kind share its engines.
each_kind = pytest.mark.parametrize(
    "fleet",
    [pytest.param(name, marks=() if name in IN_THE_GATE else pytest.mark.models) for name in KINDS],
    indirect=True,
    ids=lambda name: name.replace(" ", "-"),
)


@each_kind
def test_second_engine_computes_one_token(fleet: Fleet) -> None:
    for prompt in PROMPTS:
        assert fleet.check(fleet.first, prompt).num_cached_tokens == 0
    for prompt in PROMPTS:
        warm = fleet.check(fleet.second, prompt)
        assert warm.num_cached_tokens == warm.num_prompt_tokens - 1
    found = {path.name.partition(".")[2] for path in stored_kv(fleet.root, "*")}
    assert found == fleet.kind.parts


@each_kind
def test_stored_objects_name_the_probed_block_layout(fleet: Fleet) -> None:
    fleet.check(fleet.first, f"tried {STORY}")
    said = block_layouts(fleet.first)
    assert said
    assert len(said) == len(fleet.kind.parts)
    assert block_layouts(fleet.second) == said
    found = set()
    for path in stored_kv(fleet.root, "*"):
        with safe_open(path, framework="pt") as stored:
            found.add(json.loads(stored.metadata()["ecshare.attributes"])["page"])
    assert found == set(said)


@each_kind
def test_engine_with_another_block_layout_shares_nothing(fleet: Fleet) -> None:
    own = {"url": f"file://{fleet.root}/store", "host_cache_dir": f"{fleet.root}/other-host"}
    connector = {
        "kv_connector": "OtherKernelConnector",
        "kv_connector_module_path": "tests.engines.other_kernel",
        "kv_role": "kv_both",
        "kv_connector_extra_config": own | {"chunk_tokens": CHUNK},
    }
    flags = (*fleet.flags, f"--kv-transfer-config={json.dumps(connector)}")
    fleet.check(fleet.first, f"first {STORY}")
    model, logs = fleet.first.model, fleet.logs
    with EngineProcess("other", model, logs, flags, forks=fleet.forks) as other:
        assert len(block_layouts(other)) == len(block_layouts(fleet.first))
        assert not {*block_layouts(other)} & {*block_layouts(fleet.first)}
        with counting(other) as gained:
            assert fleet.check(other, f"first {STORY}").num_cached_tokens == 0
        assert gained["kvshare_blocks/failed"], gained
        with counting(fleet.second) as gained:
            fleet.check(other, f"other {STORY}")
            assert fleet.check(fleet.second, f"other {STORY}").num_cached_tokens == 0
        assert gained["kvshare_blocks/failed"], gained
        for engine in (other, fleet.second):
            assert "lays out its KV blocks in another way" in engine.log_path.read_text()


@each_kind
def test_longer_prompt_loads_the_stored_prefix(fleet: Fleet) -> None:
    fleet.check(fleet.first, f"longer {STORY}")
    longer = fleet.check(fleet.second, f"longer {STORY} and what came of it")
    assert longer.num_cached_tokens >= CHUNK


@each_kind
def test_lost_objects_are_recomputed_and_saved_again(fleet: Fleet) -> None:
    known = stored_kv(fleet.root, "t0of1")
    fleet.check(fleet.first, f"lost {STORY}")
    new = sorted(stored_kv(fleet.root, "t0of1") - known)
    for path in new[::2]:
        path.unlink()
    answer = fleet.check(fleet.second, f"lost {STORY}")
    assert answer.num_cached_tokens < answer.num_prompt_tokens - 1
    assert stored_kv(fleet.root, "t0of1") >= set(new), "and saved again"


@pytest.mark.models
def test_latent_attention_without_prefix_support_is_not_shared(
    tmp_path: Path, forks: EngineForks
) -> None:
    """vLLM's generic CPU kernel ignores a cached prefix when it computes the rest of a prompt."""
    model = model_cache.model(CACHE / "models", "deepseek-v2")
    flags = (*SMALL_ENGINE, "--limit-mm-per-prompt={}", "--attention-backend=CPU_MLA")
    kv = kv_argument("both", f"file://{tmp_path}/store", host_cache_dir=f"{tmp_path}/host")
    with (
        EngineProcess("plain", model, tmp_path, flags, forks=forks) as plain,
        EngineProcess("sharing", model, tmp_path, (*flags, kv), forks=forks) as sharing,
    ):
        for prompt in (STORY, f"{STORY} and what came of it", STORY):
            answer = ask(sharing, sharing.model, [text(prompt)])
            assert answer.tokens == ask(plain, plain.model, [text(prompt)]).tokens
        assert "kvshare saves and loads nothing" in sharing.log_path.read_text()
    assert not stored_kv(tmp_path, "t*")


@pytest.mark.models
@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(),
    reason="of vLLM's CPU kernels for latent attention the one for AMX alone continues a prompt",
)
def test_latent_attention_with_prefix_support_loads_prefixes(
    tmp_path: Path, forks: EngineForks
) -> None:
    """The AMX kernel takes bfloat16 only: tokens are equal only if both engines compute equally
    many at once, so the plain engine continues from its own prefix cache."""
    model = model_cache.model(CACHE / "models", "deepseek-v2")
    bfloat16 = ("--dtype=bfloat16", "--block-size=32", "--limit-mm-per-prompt={}")
    flags = (*SMALL_ENGINE, *bfloat16)

    def sharing(name: str) -> EngineProcess:
        own: dict[str, Any] = {"host_cache_dir": f"{tmp_path}/{name}-host", "chunk_tokens": CHUNK}
        kv = kv_argument("both", f"file://{tmp_path}/store", **own)
        return EngineProcess(name, model, tmp_path, (*flags, kv), forks=forks)

    with (
        EngineProcess("plain", model, tmp_path, flags, forks=forks) as plain,
        sharing("first") as first,
        sharing("second") as second,
    ):
        answers = set()
        for number, (num_chunks, num_more) in enumerate(((5, 1), (5, 45), (1, 1), (1, 45))):
            common = [20 + (number * 50 + each * 7) % 400 for each in range(num_chunks * CHUNK)]
            begun = complete(plain, plain.model, [*common, 19])
            assert complete(first, plain.model, [*common, 19]).tokens == begun.tokens
            stored_kv(tmp_path, "t0of1")
            prompt = common + [21] * num_more
            expected = complete(plain, plain.model, prompt)
            answer = complete(second, plain.model, prompt)
            assert answer.num_cached_tokens == expected.num_cached_tokens == len(common)
            assert answer.tokens == expected.tokens
            answers.add(tuple(answer.tokens))
        assert len(answers) == 4, "they tell what leads up to them"
