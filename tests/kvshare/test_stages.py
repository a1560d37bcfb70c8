# SPDX-License-Identifier: Apache-2.0
"""Pipelines: each stage stores and loads the KV of its own layers."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, init_none_hash
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec

from ecshare.store.keys import Kind, object_key
from ecshare.transfer.stats import merged
from kvshare.chunks.facts import kv_facts, kv_namespace
from kvshare.chunks.layers import AttentionWindow, refusal
from kvshare.chunks.stages import layers_of_stages
from kvshare.config import KVConfig
from kvshare.messages import announcement
from lab.vllm_loop import RUNNERS, EngineLoop, Row, RunnerName
from tests.kvshare.toy import (
    BLOCK,
    LAYERS,
    ToyModel,
    cache_config,
    chunks_for,
    hybrid,
    kv_of,
    make_request,
    next_token,
    options,
    ours,
    read_state,
    spec,
    state_of,
    vllm_config,
    window,
    write_model,
)

STAGES = 2
PROMPT = list(range(3, 3 + 5 * BLOCK + 2))
MOST_STEPS = 10_000
KINDS = {"full": (spec(),), "windows": (spec(), window(2 * BLOCK)), "hybrid": hybrid()}


class StageModel(ToyModel):
    """The layers of one stage. The last stage samples, from the KV in the blocks of all stages."""

    def __init__(self, cache: KVCacheConfig, before: Sequence["StageModel"]) -> None:
        self.num_computed: Counter[str] = Counter()
        super().__init__(cache, lambda *_: None)
        self._stages = (*before, self)

    def compute(self, request_id: str, start: int, end: int) -> list[int]:
        row = self.rows[request_id]
        self.num_computed[request_id] += max(0, min(end, row.num_prompt_tokens) - start)
        for position in range(start, end):
            self.fill(row, position, [*self.flavour(row), *row.tokens[: position + 1]])
        self._advance(row, start, end)
        if len(self._stages) < STAGES or end < len(row.tokens):
            return []
        token = next_token([it for each in self._stages for it in each.seen(request_id, end)])
        for each in self._stages:  # as the scheduler tells the others
            each.rows[request_id].tokens.append(token)
        return [token]

    def flavour(self, row: Row) -> list[int]:
        return [len(self._stages)]

    def seen(self, request_id: str, end: int) -> list[float | str]:
        found: list[float | str] = []
        for group, each in enumerate(self.windows):
            if each is None:
                block = self._state_block(self.rows[request_id], group, end)
                found += [read_state(layer, block).hex() for layer in self._groups[group]]
                continue
            for position in range(each.first_needed(end - 1), end):
                cells = self._cells(self.rows[request_id], group, position)
                assert cells.min() == cells.max(), "a token's KV is torn"
                found.append(float(cells[0, 0, 0]))
        return found


def expected(windows: Sequence[AttentionWindow | None], num_tokens: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        seen: list[float | str] = []
        for stage in range(STAGES):
            for group, each in enumerate(windows):
                if each is None:
                    states = (state_of([stage + 1, *tokens], group, at) for at in range(LAYERS))
                    seen += [state.hex() for state in states]
                    continue
                first = each.first_needed(len(tokens) - 1)
                upto = range(first, len(tokens))
                seen += [kv_of([stage + 1, *tokens[: at + 1]], group) for at in upto]
        tokens.append(next_token(seen))
    return tokens[len(PROMPT) :]


def stage_cache(stage: int, specs: Sequence[KVCacheSpec]) -> KVCacheConfig:
    """Return the cache of a stage: as many layers of each group as the other stages have."""
    found = cache_config(64, specs)
    for group in found.kv_cache_groups:
        group.layer_names = [of_stage(name, stage, len(specs)) for name in group.layer_names]
    tensors = [
        replace(each, layers=[of_stage(name, stage, len(specs)) for name in each.layers])
        for each in found.kv_cache_tensors
    ]
    return replace(found, kv_cache_tensors=tensors)


def of_stage(name: str, stage: int, num_groups: int) -> str:
    model, layers, number, *rest = name.split(".")
    return ".".join((model, layers, str(int(number) + stage * LAYERS * num_groups), *rest))


class Pipeline(EngineLoop):
    """An engine of two stages with our connector in each of them."""

    def __init__(
        self, folder: Path, name: str, caches: Sequence[KVCacheConfig], runner: RunnerName
    ) -> None:
        init_none_hash(sha256)
        kv_options = options(folder) | {"host_cache_dir": f"{folder}/{name}"}
        config = pipeline_config(folder, kv_options)
        if any(isinstance(group.kv_cache_spec, MambaSpec) for group in caches[0].kv_cache_groups):
            config.cache_config.mamba_cache_mode = "align"  # as vLLM does for hybrids
            config.cache_config.mamba_block_size = BLOCK
            config.cache_config.mamba_page_size_padded = spec().page_size_bytes
        self.models: list[StageModel] = []
        for each in caches:
            self.models.append(StageModel(each, self.models))
        self.tokens: list[int] = []
        self.announced: Any = None
        self.counts: dict[str, float] = {}
        cache = generate_scheduler_kv_cache_config(list(caches))
        with patch("kvshare.worker.worker.repacks_blocks", lambda: False):
            super().__init__(config, self.models, cache, runner, caches)
        self.workers = [ours(each.kv_connector).worker for each in self.runners]

    def serve(self, name: str = "r", num_tokens: int = 3) -> list[int]:
        """Return the tokens that follow `PROMPT`, once all is stored."""
        self.tokens = []
        self.scheduler.add_request(make_request(name, PROMPT, num_tokens))
        for _ in range(MOST_STEPS):
            if not self.has_work:
                break
            self.step()
        assert not self.has_work, "the engine hangs"
        for worker in self.workers:
            while worker.engine.in_flight:
                worker.engine.wait_idle()
                worker.settle()
        return self.tokens

    def received(self, outputs: EngineCoreOutputs) -> None:
        stats = outputs.scheduler_stats
        if stats and stats.kv_connector_stats:
            counts = stats.kv_connector_stats
            self.counts = merged(self.counts, getattr(counts, "data", counts))
        for one in outputs.outputs:
            self.tokens += one.new_token_ids
            self.announced = one.kv_transfer_params or self.announced

    def num_computed(self, name: str) -> list[int]:
        return [each.num_computed[name] for each in self.models]


def pipeline_config(folder: Path, kv_options: dict[str, Any], stages: int = STAGES) -> Any:
    model = write_model(folder / "model")
    described = json.loads((model / "config.json").read_text())
    described["num_hidden_layers"] = STAGES * LAYERS
    (model / "config.json").write_text(json.dumps(described))
    return vllm_config(model, kv_options, pipeline_parallel_size=stages)


Start = Callable[..., Pipeline]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Pipeline] = []

    def start(
        specs: Sequence[KVCacheSpec] = (),
        runner: RunnerName = "v1",
        change: Callable[[list[KVCacheConfig]], None] = lambda _: None,
    ) -> Pipeline:
        caches = [stage_cache(stage, specs or (spec(),)) for stage in range(STAGES)]
        change(caches)
        name = f"host-{len(started)}"
        started.append(Pipeline(tmp_path, name, caches, runner))
        return started[-1]

    yield start
    for each in started:
        each.close()


def stored(folder: Path) -> Counter[str]:
    """Return how many objects there are of each part."""
    names = (each.name for each in (folder / "store").rglob("*.t*") if each.is_file())
    return Counter(name.partition(".")[2] for name in names)


def test_announcement_names_the_number_of_stages(start: Start) -> None:
    writer = start()
    writer.serve()
    assert writer.announced == announcement(len(PROMPT) - 1, 1, STAGES)


def stored_of(folder: Path, part: str) -> list[Path]:
    return sorted((folder / "store").rglob(f"*.{part}"))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_stage_loads_its_layers_of_an_equal_pipeline(
    start: Start, tmp_path: Path, kind: str, runner: RunnerName
) -> None:
    writer, reader = (start(KINDS[kind], runner) for _ in range(2))
    right = expected(writer.models[0].windows, 3)
    assert writer.serve() == right
    found = stored(tmp_path)
    sets = ["t0of1", "t0of1-s1"][: len(KINDS[kind])]
    assert found.keys() == {f"{part}-p{stage}of2" for part in sets for stage in range(STAGES)}
    for part in sets:
        assert found[f"{part}-p0of2"] == found[f"{part}-p1of2"] > 0
    assert reader.serve() == right
    num_loaded = len(PROMPT) // BLOCK * BLOCK if kind == "hybrid" else len(PROMPT) - 1
    assert writer.num_computed("r") == [len(PROMPT)] * STAGES
    assert reader.num_computed("r") == [len(PROMPT) - num_loaded] * STAGES
    assert reader.counts["tokens/hit"] == reader.counts["tokens/loaded"] == num_loaded
    assert stored(tmp_path) == found


@pytest.mark.parametrize("stage", range(STAGES))
def test_chunks_are_missing_if_one_stage_lacks_its_objects(
    start: Start, tmp_path: Path, stage: int
) -> None:
    writer, reader = start(), start()
    right = writer.serve()
    for path in stored_of(tmp_path, f"t0of1-p{stage}of2"):
        path.unlink()
    assert reader.serve() == right
    assert reader.num_computed("r") == [len(PROMPT)] * STAGES
    assert reader.counts["tokens/queried"]
    assert not reader.counts.get("tokens/hit"), "no load is ordered"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", range(STAGES))
def test_what_one_stage_has_lost_all_stages_compute(
    start: Start, tmp_path: Path, stage: int, kind: str
) -> None:
    """The look-up finds them, and the load does not: the object of one stage is damaged."""
    writer, reader = (start(KINDS[kind]) for _ in range(2))
    right = writer.serve()
    part = f"t0of1-p{stage}of2"
    for path in stored_of(tmp_path, part):
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert reader.serve() == right
    assert reader.num_computed("r") == [len(PROMPT)] * STAGES
    assert reader.serve("again") == right


def test_engine_with_another_number_of_stages_or_other_ones_has_another_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def namespace(stages: int) -> str:
        return kv_namespace(pipeline_config(tmp_path, options(tmp_path), stages), "").digest

    found = [namespace(stages) for stages in (1, 2, 3)]
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,4")
    found.append(namespace(2))
    assert len({*found}) == 4
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,3")
    assert namespace(2) == found[1]


def test_saves_reserve_what_the_largest_stage_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler knows the first stage's layers, with `LAYERS` of them here."""

    def chunk_bytes(partition: str) -> int:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
        config, chosen = pipeline_config(tmp_path, options(tmp_path)), KVConfig(**options(tmp_path))
        facts = kv_facts(config, cache_config(8), chosen, can_share=True)
        return facts.chunk_bytes(64) - facts.chunk_bytes(32)

    assert chunk_bytes("2,4") == 2 * chunk_bytes("3,3") == 2 * chunk_bytes("4,2")


def test_partition_of_other_layers_stops_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,2")
    assert layers_of_stages(pipeline_config(tmp_path, options(tmp_path))) == (6, 6)


def test_engine_without_stages_keeps_its_namespace(tmp_path: Path) -> None:
    config = pipeline_config(tmp_path, options(tmp_path), 1)
    assert "stages" not in kv_namespace(config, "").facts
    assert layers_of_stages(config) == ()


def test_engines_with_another_seed_of_hashes_have_another_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's block hashes begin with it: such engines find nothing of each other."""
    config = pipeline_config(tmp_path, options(tmp_path))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    found = {kv_namespace(config, "").digest}
    assert "hash_seed" not in kv_namespace(config, "").facts
    for seed in ("0", "1"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.add(kv_namespace(config, "").digest)
    assert len(found) == 3


@pytest.mark.parametrize("stage", range(STAGES))
def test_chunks_before_the_one_that_a_stage_has_lost_are_kept(
    start: Start, tmp_path: Path, stage: int
) -> None:
    writer, reader = start(), start()
    right = writer.serve()
    lost = chunks_for(make_request("r", PROMPT))[2]
    part = f"t0of1-p{stage}of2"
    name = object_key(Kind.KV, "0" * 32, bytes(lost.key), part).rpartition("/")[2]
    (path,) = (tmp_path / "store").rglob(name)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert reader.serve() == right
    assert reader.num_computed("r") == [len(PROMPT) - 2 * BLOCK] * STAGES


@pytest.mark.parametrize("group", range(2))
def test_stage_that_lacks_a_cache_group_is_refused(tmp_path: Path, group: int) -> None:
    """vLLM makes the groups of all layers, and leaves out of them what a stage does not have."""
    config = stage_cache(0, KINDS["windows"])
    config.kv_cache_groups[group].layer_names = []
    why_not = refusal(pipeline_config(tmp_path, options(tmp_path)), config)
    assert "has no layer of a cache group" in (why_not or "")


def test_pipeline_shares_nothing_if_a_later_stage_has_other_layer_sets(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a draft model in the last stage: a number would mean other layers there."""

    def change(caches: list[KVCacheConfig]) -> None:
        caches[1].kv_cache_groups[0] = replace(
            caches[1].kv_cache_groups[0], kv_cache_spec=window(8 * BLOCK)
        )

    with caplog.at_level(logging.WARNING):
        writer, reader = (start(change=change) for _ in range(2))
        first, second = (each.serve() for each in (writer, reader))
    assert "layers of other kinds" in caplog.text
    assert len(first) == len(second) == 3
    assert reader.num_computed("r") == [len(PROMPT)] * STAGES
    assert not writer.scheduler.get_kv_connector().scheduler._facts.saves  # type: ignore[union-attr]
    assert not stored_of(tmp_path, "t0of1-p1of2")
