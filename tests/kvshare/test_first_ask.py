# SPDX-License-Identifier: Apache-2.0
"""A prompt that is whole in this host's memory is found when vLLM first asks."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from ecshare.store.hostcache.cache import HostCache
from ecshare.store.hostcache.folder import SHM
from ecshare.transfer.quick_looks import NAMES_A_STEP
from lab.vllm_loop import RunnerName
from tests.kvshare.conftest import StartEngine
from tests.kvshare.toy import BLOCK, ToyEngine, expected_answer, make_request, serve

PROMPT = list(range(5 * BLOCK + 2))


@pytest.fixture
def place() -> Iterator[dict[str, Any]]:
    """Options that put the host cache into memory."""
    with tempfile.TemporaryDirectory(dir=SHM, prefix="kvshare-test-") as folder:
        yield {"host_cache_dir": f"{folder}/host"}


def first_ask(engine: ToyEngine, request: Request) -> int | None:
    """What the scheduler half says when vLLM first asks."""
    return engine.connector.scheduler.num_loadable_tokens(request, 0)


def entries(place: dict[str, Any]) -> list[Path]:
    return sorted(Path(place["host_cache_dir"]).glob("*.t0of1*"))


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_what_this_host_has_is_loaded_a_step_sooner(
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
    assert is_loading is in_memory, "else the I/O thread is asked first"
    engine.run_out()
    answer = engine.answers["r"]
    assert answer.tokens == expected_answer(PROMPT, 3)
    assert answer.computed_prompt_tokens == 1
    assert engine.counts["tokens/loaded"] == len(PROMPT) - 1


@pytest.mark.parametrize("chunk_blocks", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", range(1, 5 * BLOCK + 3))
def test_it_is_what_a_look_up_finds(
    start: StartEngine, place: dict[str, Any], chunk_blocks: int, num_tokens: int
) -> None:
    prompt, options = PROMPT[:num_tokens], place | {"chunk_tokens": chunk_blocks * BLOCK}
    engine = start(store=options)
    serve(engine, prompt, 1, "first")
    half = engine.connector.scheduler
    for start_tokens in range(0, num_tokens, BLOCK):
        at_once = half.num_loadable_tokens(make_request(f"a{start_tokens}", prompt), start_tokens)
        assert at_once == num_tokens - 1 - start_tokens


def test_what_is_not_whole_is_looked_up(start: StartEngine, place: dict[str, Any]) -> None:
    engine = start(store=place)
    serve(engine, PROMPT, 1, "first")
    longer = [*PROMPT[: 5 * BLOCK], *range(500, 520)]
    assert first_ask(engine, make_request("longer", longer)) is None
    entries(place)[0].unlink()
    assert first_ask(engine, make_request("torn", PROMPT)) is None
    assert serve(start(store=place), PROMPT).computed_prompt_tokens == 1, "the store has it still"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that the host cache is asked for."""
    names: list[str] = []
    has = HostCache.has

    def noted(cache: HostCache, key: Any) -> bool:
        names.append(key)
        return has(cache, key)

    monkeypatch.setattr(HostCache, "has", noted)
    return names


def test_a_step_takes_a_limited_number_of_looks(
    start: StartEngine, place: dict[str, Any], looks: list[str]
) -> None:
    engine = start(store=place)
    serve(engine, PROMPT, 1, "first")
    looks.clear()
    requests = [make_request(f"r{number}", PROMPT) for number in range(NAMES_A_STEP)]
    found = [first_ask(engine, request) for request in requests]
    assert found[0] == len(PROMPT) - 1
    assert found[-1] is None
    assert len(looks) <= NAMES_A_STEP
    engine.connector.scheduler.orders(SchedulerOutput.make_empty())
    assert first_ask(engine, make_request("later", PROMPT)) == len(PROMPT) - 1


def test_of_a_long_prompt_some_chunks_are_asked_for(
    start: StartEngine, place: dict[str, Any], looks: list[str]
) -> None:
    engine = start(store=place, num_blocks=128)
    prompt = list(range(100 * BLOCK + 1))
    serve(engine, prompt, 1, "first")
    looks.clear()
    assert first_ask(engine, make_request("again", prompt)) == len(prompt) - 1
    assert len(looks) == 1 + 16


@pytest.mark.parametrize(("num_chunks", "num_looks"), [(128, 1), (129, 0)])
def test_of_a_new_prompt_one_chunk_is_asked_for_and_none_if_it_is_too_long_for_a_hook(
    start: StartEngine, place: dict[str, Any], looks: list[str], num_chunks: int, num_looks: int
) -> None:
    engine = start(store=place)
    prompt = list(range(num_chunks * BLOCK))
    assert first_ask(engine, make_request("new", prompt)) is None
    assert len(looks) == num_looks
