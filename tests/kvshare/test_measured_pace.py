# SPDX-License-Identifier: Apache-2.0
"""The measured compute speed of an engine whose device runs asynchronously to the host."""

import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from kvshare.scheduler.load_or_compute import LoadOrCompute, Pace
from tests.kvshare.toy import ToyEngine, expected_answer, make_request, options, vllm_config

# A thousand times as long as a load takes, so that loading always pays.
TOKEN_S = 1.0
LAUNCH_S = 0.002
PROMPT = 100
EACH_ENGINE = [("v1", False), ("v1", True), ("v2", False), ("v2", True)]


class OnDevice(ToyEngine):
    """Simulates a device: a launch takes LAUNCH_S of host time, a token TOKEN_S of device time."""

    now_s = 0.0
    _free_s = 0.0

    def watch(self) -> None:
        """Have the scheduler half measure with this engine's simulated clock."""
        self._ends_s = deque[float]()
        self.connector.scheduler._choice = LoadOrCompute(lambda: self.now_s)

    def execute(self, output: SchedulerOutput) -> None:
        self.now_s += LAUNCH_S
        super().execute(output)
        num_tokens = output.total_num_scheduled_tokens
        if num_tokens:
            self._free_s = max(self._free_s, self.now_s) + num_tokens * TOKEN_S
        self._ends_s.append(self._free_s if num_tokens else self.now_s)

    def update(self) -> None:
        if self.in_flight:
            self.now_s = max(self.now_s, self._ends_s.popleft())
        super().update()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Record the tokens and seconds of each measured step."""
    seen: list[tuple[int, float]] = []
    add = Pace.add

    def watched(self: Pace, num_tokens: int, seconds: float) -> None:
        seen.append((num_tokens, seconds))
        add(self, num_tokens, seconds)

    monkeypatch.setattr(Pace, "add", watched)
    return seen


StartOnDevice = Callable[[], OnDevice]


@pytest.fixture(params=EACH_ENGINE, ids=lambda one: f"{one[0]}-{'async' if one[1] else 'sync'}")
def on_device(
    request: pytest.FixtureRequest, text_model: Path, tmp_path: Path
) -> Iterator[StartOnDevice]:
    """Start engines with a simulated device on this test's store, each on its own host."""
    runner, is_async = request.param
    started: list[OnDevice] = []

    def start() -> OnDevice:
        own = options(tmp_path, load="if_faster", host_cache_dir=f"{tmp_path}/host-{len(started)}")
        config = vllm_config(text_model, own)
        engine = OnDevice(config, num_blocks=200, is_async=is_async, runner=runner)
        engine.watch()
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()


def prompt(number: int) -> list[int]:
    return [(number * 7919 + position * 31) % 900 + 1 for position in range(PROMPT)]


def serve(engine: ToyEngine, name: str, number: int) -> int:
    """Answer a prompt; return how many of its tokens were computed."""
    (answer,) = engine.run(make_request(name, prompt(number), 2))
    assert answer.tokens == expected_answer(prompt(number), 2)
    return answer.computed_prompt_tokens


def are_right(measured: list[tuple[int, float]]) -> bool:
    return all(s == pytest.approx(n * TOKEN_S, rel=0.001) for n, s in measured)


def test_measured_seconds_equal_the_device_time_of_each_step(
    on_device: StartOnDevice, measured: list[tuple[int, float]]
) -> None:
    """Empty steps in between, in which workers report finished saves, do not distort it."""
    engine = on_device()
    for number in range(8):
        assert serve(engine, f"{number}", number) == PROMPT
    assert [num_tokens for num_tokens, _ in measured] == 8 * [PROMPT]
    assert are_right(measured)


def test_step_times_are_right_while_the_store_fails(
    on_device: StartOnDevice, measured: list[tuple[int, float]], tmp_path: Path
) -> None:
    """Workers then report in every step."""
    engine = on_device()
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("no folder")
    for number in range(8):
        assert serve(engine, f"{number}", number) == PROMPT
    assert "write" in engine.worker.engine.open_breakers
    assert [num_tokens for num_tokens, _ in measured] == 8 * [PROMPT]
    assert are_right(measured)


def test_stored_prompts_are_loaded_between_new_ones(
    on_device: StartOnDevice, measured: list[tuple[int, float]]
) -> None:
    writer, reader = on_device(), on_device()
    for number in range(4):
        serve(writer, f"w{number}", number)
    for number in range(4):
        for new in range(3):
            assert serve(reader, f"new{number}.{new}", 100 + 3 * number + new) == PROMPT
        assert serve(reader, f"r{number}", number) == 1
    assert are_right(measured)
