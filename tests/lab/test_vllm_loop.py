# SPDX-License-Identifier: Apache-2.0
"""The simulator of vLLM's loop calls connectors in the order of vLLM's V1 and V2 runners."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec

from lab.conformance import Subject
from lab.conformance.engine import Engine
from lab.conformance.harness import Place
from lab.conformance.pictures import picture
from lab.vllm_loop import RUNNERS, RunnerName
from tests.kvshare.toy import (
    ToyEngine,
    hybrid,
    make_request,
    options,
    vllm_config,
    write_model,
)
from tests.releases import needs_offered_states

OPTIONS = {"url": "{folder}", "host_cache_dir": "{host}", "wait_s": 1}
EC_STEP = ["bind_connector_metadata", "start_save_caches", "start_load_caches"]
EC_REPORT = ["get_finished", "build_connector_worker_meta", "clear_connector_metadata"]
KV_REPORT = [
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
]
LAYERS = ["wait_for_layer_load"] * 3 + ["save_kv_layer"] * 3


@contextmanager
def encoder_engine(vlm: Path, runner: RunnerName, role: str = "ec_both") -> Iterator[Engine]:
    subject = Subject("ecshare.connector", "ECShareConnector", OPTIONS, vlm)
    with Place(subject, runner, "both") as place:
        yield place.engine(role, "one", async_scheduling=False)


def step(engine: Engine | ToyEngine) -> list[str]:
    """Run one step; return the hooks that its only rank called."""
    engine.runners[0].log.clear()
    engine.execute(engine.schedule())
    engine.update_all()
    return list(engine.runners[0].log.order)


def ec_order(vlm: Path, runner: RunnerName, role: str = "ec_both") -> tuple[list[str], list[str]]:
    """Return the hooks of a step that encodes two items, and of one without tokens."""
    with encoder_engine(vlm, runner, role) as engine:
        engine.submit(picture(1), picture(2))
        while "save_caches" not in (busy := step(engine)):
            assert not engine.encoded
        engine.idle()
        return busy, step(engine)


def test_v1_saves_in_any_role_and_skips_ec_hooks_in_empty_steps(vlm: Path) -> None:
    busy, empty = ec_order(vlm, "v1")
    assert busy == [*EC_STEP, "save_caches", "save_caches", *EC_REPORT]
    assert empty == []
    with encoder_engine(vlm, "v1", "ec_consumer") as engine:
        engine.submit(picture(1))
        while not engine.encoded:
            hooks = step(engine)
        assert "save_caches" in hooks


def test_v2_saves_on_producers_and_calls_ec_hooks_in_empty_steps(vlm: Path) -> None:
    busy, empty = ec_order(vlm, "v2")
    report = ["get_finished", "get_ec_connector_stats", *EC_REPORT[1:]]
    if "get_ec_connector_stats" not in busy:  # until vLLM 0.30
        report = EC_REPORT
    assert busy == [*EC_STEP, "save_caches", "save_caches", *report]
    assert empty == [*EC_STEP, *report]
    with encoder_engine(vlm, "v2", "ec_consumer") as engine:
        engine.submit(picture(1))
        while not engine.encoded:
            hooks = step(engine)
        assert "save_caches" not in hooks


@pytest.mark.parametrize("runner", RUNNERS)
def test_kv_is_saved_after_the_forward_pass(tmp_path: Path, runner: RunnerName) -> None:
    hooks = kv_order(tmp_path, runner)
    start = ["handle_preemptions", "bind_connector_metadata"]
    finish = ["finish_forward"] if runner == "v2" else []
    save = ["start_load_kv", "wait_for_save"]
    end = ["clear_connector_metadata"]
    assert hooks == [*start, *LAYERS, *finish, *save, *KV_REPORT, *end]


@needs_offered_states
@pytest.mark.parametrize("runner", RUNNERS)
def test_layers_with_a_state_call_no_hooks(tmp_path: Path, runner: RunnerName) -> None:
    hooks = kv_order(tmp_path, runner, specs=hybrid(2))
    assert [each for each in hooks if each in LAYERS] == LAYERS


def test_speculating_v1_runner_waits_for_saves_last(tmp_path: Path) -> None:
    speculating = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    hooks = kv_order(tmp_path, "v1", speculative_config=speculating)
    last = ["wait_for_save", "clear_connector_metadata"]
    assert hooks[-len(KV_REPORT) - 2 :] == [*KV_REPORT, *last]


def test_v2_zeroes_new_blocks_before_preemption_saves(tmp_path: Path) -> None:
    """V1 does so afterwards. The difference matters if vLLM zeroes new blocks."""
    seen: dict[RunnerName, float] = {}
    for runner in RUNNERS:
        with kv_engine(tmp_path / runner, runner) as engine:
            engine.add(make_request("r", [1, 2, 3]))
            output = engine.schedule()
            output.new_block_ids_to_zero = [5]
            worker, cache = engine.runners[0].kv_connector, engine.model.kv_caches
            assert worker is not None
            first = next(iter(cache.values()))
            save = worker.handle_preemptions

            def note(orders: object) -> None:
                seen.setdefault(runner, float(first[5].abs().max()))  # noqa: B023 - in this turn
                save(orders)  # type: ignore[arg-type]  # noqa: B023

            worker.handle_preemptions = note  # type: ignore[method-assign, assignment]
            engine.execute(output)
            engine.update_all()
            engine.run_out()
    assert seen == {"v1": 7.0, "v2": 0.0}


@pytest.mark.parametrize("runner", RUNNERS)
def test_step_restores_vllms_own_layers(tmp_path: Path, runner: RunnerName) -> None:
    """A connector that starts later with the same configuration reads them."""
    with kv_engine(tmp_path, runner) as engine:
        vllms = engine.config.compilation_config.static_forward_context
        engine.add(make_request("r", [1, 2, 3]))
        engine.run_out()
        assert engine.config.compilation_config.static_forward_context is vllms


@contextmanager
def kv_engine(
    folder: Path, runner: RunnerName, specs: Sequence[KVCacheSpec] = (), **engine_args: Any
) -> Iterator[ToyEngine]:
    config = vllm_config(write_model(folder / "model"), options(folder), **engine_args)
    engine = ToyEngine(config, runner=runner, specs=specs)
    try:
        yield engine
    finally:
        engine.close()


def kv_order(folder: Path, runner: RunnerName, **engine_args: Any) -> list[str]:
    """Return the hooks of a step that computes a prompt."""
    with kv_engine(folder, runner, **engine_args) as engine:
        engine.add(make_request("r", list(range(10))))
        while "wait_for_layer_load" not in (hooks := step(engine)):
            pass
        engine.run_out()
    return hooks


# --- vLLM's own source, which the simulator follows without calling it ---


def text_between(path: str, start: str, end: str = "\n    def ") -> str:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    source = (Path(spec.submodule_search_locations[0]) / path).read_text()
    begin = source.index(start)
    return source[begin:].split(end, 1)[0]


@pytest.mark.parametrize(
    ("path", "function", "calls"),
    [
        (
            "v1/worker/gpu_model_runner.py",
            "def execute_model(",
            [
                ".handle_preemptions(",
                "self._update_states(",
                "if has_ec_transfer() and not get_ec_transfer().is_consumer",
                "self._execute_mm_encoder(",
                "return make_empty_encoder_model_runner_output(",
                "if not num_scheduled_tokens:",
                "self.kv_connector_no_forward(",
                "self._preprocess(",
                "set_forward_context(",
                "self.maybe_get_kv_connector_output(",
                "self._model_forward(",
            ],
        ),
        (
            "v1/worker/gpu_model_runner.py",
            "def _preprocess(",
            ["maybe_get_ec_connector_output(", "_execute_mm_encoder(", "_gather_mm_embeddings("],
        ),
        (
            "v1/worker/gpu_model_runner.py",
            "def sample_tokens(",
            ["self._sample(", "self.finalize_kv_connector()"],
        ),
        (
            "v1/worker/gpu/model_runner.py",
            "def execute_model(",
            [
                "self.finish_requests(",
                "self.add_requests(",
                "self.update_requests(",
                "self.kv_connector.no_forward(",
                "self._merge_ec_connector_no_forward(",
                "self.ec_connector.maybe_get_output(",
                "set_forward_context(",
                "self.kv_connector.pre_forward(",
                "self.model(**model_inputs)",
                "self.kv_connector.finish_forward()",
            ],
        ),
        (
            "v1/worker/gpu/model_runner.py",
            "def update_requests(",
            [".append_block_ids(", ".zero_block_ids("],
        ),
        (
            "v1/worker/mm_encoder_model_runner.py",
            "def execute_model(",
            ["self._no_forward(", "maybe_get_output(", "execute_mm_encoder("],
        ),
        (
            "v1/engine/core.py",
            "def step_with_batch_queue(",
            [
                "self.scheduler.schedule(",
                "self.model_executor.execute_model(",
                "len(batch_queue) < self.batch_queue_size and",
                "return None, model_executed",
                "self.scheduler.update_from_output(",
            ],
        ),
    ],
)
def test_installed_vllm_has_the_simulated_order(path: str, function: str, calls: list[str]) -> None:
    text = text_between(path, function)
    at = 0
    for call in calls:
        assert call in text[at:], f"{path}, {function}: {call} is not where it was"
        at = text.index(call, at) + len(call)
