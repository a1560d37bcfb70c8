# SPDX-License-Identifier: Apache-2.0
"""A prompt whose chunks are all in host memory is found in vLLM's first call of the hook."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from ecshare.store.hostcache.cache import HostCache
from ecshare.store.hostcache.folder import SHM
from ecshare.transfer.inline_reads import CHECKS_PER_STEP
from kvshare.worker.block_writer import BlockWriter
from lab.vllm_loop import RunnerName
from tests.kvshare.conftest import StartEngine
from tests.kvshare.toy import BLOCK, ToyEngine, expected_answer, make_request, serve

PROMPT = list(range(5 * BLOCK + 2))


@pytest.fixture
def place() -> Iterator[dict[str, Any]]:
    """Return options that place the host cache in /dev/shm."""
    with tempfile.TemporaryDirectory(dir=SHM, prefix="kvshare-test-") as folder:
        yield {"host_cache_dir": f"{folder}/host"}


def first_call(engine: ToyEngine, request: Request) -> int | None:
    """Return the scheduler half's answer to vLLM's first call for `request`."""
    return engine.connector.scheduler.num_loadable_tokens(request, 0)


def entries(place: dict[str, Any]) -> list[Path]:
    return sorted(Path(place["host_cache_dir"]).glob("*.t0of1*"))


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_prompt_in_host_memory_starts_loading_in_the_first_step(
    start: StartEngine,
    place: dict[str, Any],
    runner: RunnerName,
    is_async: bool,
    in_memory: bool,
) -> None:
    serve(start(store=place), PROMPT)
    engine = start(store=place, runner=runner, is_async=is_async)
    engine.connector.scheduler.engine.host.is_in_memory = in_memory
    request = make_request("r", PROMPT, 3)
    engine.add(request)
    engine.step()
    is_loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert is_loading is in_memory, "else a lookup on the I/O thread comes first"
    engine.run_out()
    answer = engine.answers["r"]
    assert answer.tokens == expected_answer(PROMPT, 3)
    assert answer.computed_prompt_tokens == 1
    assert engine.counts["tokens/loaded"] == len(PROMPT) - 1


def test_idle_engine_makes_no_step_for_each_chunk_that_is_loaded(
    start: StartEngine, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ecshare.transfer.engine._IDLE_WAIT_S", 30.0)
    write = BlockWriter.write

    def slowly(*given: Any) -> str:
        time.sleep(0.02)  # so that no two chunks end at once
        return write(*given)

    serve(start(store=place), PROMPT)
    engine = start(store=place)
    monkeypatch.setattr(BlockWriter, "write", slowly)
    request = make_request("r", PROMPT, 3)
    engine.add(request)
    num_steps = 0
    while not engine.counts.get("blocks/loaded"):
        engine.step()
        num_steps += 1
    assert engine.counts["blocks/loaded"] == 6
    assert num_steps == 1
    engine.run_out()
    assert engine.answers["r"].tokens == expected_answer(PROMPT, 3)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_load_starts_before_the_forward_pass_of_its_step(
    start: StartEngine,
    place: dict[str, Any],
    runner: RunnerName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it could not end in a step that computes, and its request would wait for another one."""
    serve(start(store=place), PROMPT)
    engine = start(store=place, runner=runner)
    # It lasts until the look-up has its answer, on a busy machine too: seconds.
    engine.add(make_request("busy", range(900, 905), 100))
    engine.step()
    done: list[str] = []
    compute = engine.model.compute

    def noted(request_id: str, first: int, end: int) -> list[int]:
        done.append(f"compute {request_id}")
        return compute(request_id, first, end)

    monkeypatch.setattr(engine.model, "compute", noted)
    engine.before_load = lambda: done.append("load")
    engine.add(make_request("r", PROMPT, 3))
    while "load" not in done:
        done.clear()
        time.sleep(0.02)
        engine.step()
    assert done == ["load", "compute busy"]
    engine.run_out()
    assert engine.answers["r"].tokens == expected_answer(PROMPT, 3)


@pytest.mark.parametrize("chunk_blocks", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", range(1, 5 * BLOCK + 3))
def test_first_call_finds_the_whole_prompt_from_any_block(
    start: StartEngine, place: dict[str, Any], chunk_blocks: int, num_tokens: int
) -> None:
    prompt, options = PROMPT[:num_tokens], place | {"chunk_tokens": chunk_blocks * BLOCK}
    engine = start(store=options)
    serve(engine, prompt, 1, "first")
    half = engine.connector.scheduler
    for start_tokens in range(0, num_tokens, BLOCK):
        at_once = half.num_loadable_tokens(make_request(f"a{start_tokens}", prompt), start_tokens)
        assert at_once == num_tokens - 1 - start_tokens


def test_incomplete_host_hit_goes_through_a_lookup(
    start: StartEngine, place: dict[str, Any]
) -> None:
    engine = start(store=place)
    serve(engine, PROMPT, 1, "first")
    longer = [*PROMPT[: 5 * BLOCK], *range(500, 520)]
    assert first_call(engine, make_request("longer", longer)) is None
    entries(place)[0].unlink()
    assert first_call(engine, make_request("torn", PROMPT)) is None
    assert serve(start(store=place), PROMPT).computed_prompt_tokens == 1, "the store still has it"


@pytest.fixture
def probed_keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the keys that the host cache is asked for."""
    names: list[str] = []
    has = HostCache.has

    def noted(cache: HostCache, key: Any) -> bool:
        names.append(key)
        return has(cache, key)

    monkeypatch.setattr(HostCache, "has", noted)
    return names


def test_host_cache_checks_per_step_are_bounded(
    start: StartEngine, place: dict[str, Any], probed_keys: list[str]
) -> None:
    engine = start(store=place)
    serve(engine, PROMPT, 1, "first")
    probed_keys.clear()
    requests = [make_request(f"r{number}", PROMPT) for number in range(CHECKS_PER_STEP)]
    found = [first_call(engine, request) for request in requests]
    assert found[0] == len(PROMPT) - 1
    assert found[-1] is None
    assert len(probed_keys) <= CHECKS_PER_STEP
    engine.connector.scheduler.orders(SchedulerOutput.make_empty())
    assert first_call(engine, make_request("later", PROMPT)) == len(PROMPT) - 1


def test_first_call_samples_the_chunks_of_a_long_prompt(
    start: StartEngine, place: dict[str, Any], probed_keys: list[str]
) -> None:
    engine = start(store=place, num_blocks=128)
    prompt = list(range(100 * BLOCK + 1))
    serve(engine, prompt, 1, "first")
    probed_keys.clear()
    assert first_call(engine, make_request("again", prompt)) == len(prompt) - 1
    assert len(probed_keys) == 1 + 16


@pytest.mark.parametrize(("num_chunks", "num_looks"), [(128, 1), (129, 0)])
def test_first_lookup_probes_one_chunk(
    start: StartEngine,
    place: dict[str, Any],
    probed_keys: list[str],
    num_chunks: int,
    num_looks: int,
) -> None:
    engine = start(store=place)
    prompt = list(range(num_chunks * BLOCK))
    assert first_call(engine, make_request("new", prompt)) is None
    assert len(probed_keys) == num_looks
