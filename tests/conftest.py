# SPDX-License-Identifier: Apache-2.0
"""Real things for tests: a small model, an S3 server, engines. All end with the test run."""

import importlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from lab import model_cache
from lab.servers.engine_forks import EngineForks
from lab.servers.engines import ON_V2, SMALL_ENGINE, EngineProcess, ModelRunner, engine_forks
from lab.servers.s3 import SeaweedFS
from tests.waiting import Clock

CACHE = Path(__file__).parents[1] / ".cache"
# `make test` runs two sessions at once, each with a worker of the same name.
LOGS = CACHE.joinpath(
    *("logs", "tests", os.environ.get("TESTS_LOGS", "")), os.environ.get("PYTEST_XDIST_WORKER", "")
)

MAKEFILE = (Path(__file__).parents[1] / "Makefile").read_text()
TESTS_OF = {
    kind: tuple(re.findall(rf"^{kind.upper()}_TESTS := (.+)", MAKEFILE, re.MULTILINE)[0].split())
    for kind in ("engine", "packaging")
}
"""The files and folders in which `make engines` and `make packaging` look for their tests."""
LONGEST = (
    *("test_demo.py", "test_examples.py", "test_defaults.py", "test_kv.py"),
    *("test_models.py", "test_gpu_kit.py", "test_setup.py", "test_programs.py"),
)
"""The files that begin first: of `make engines`, minutes each; of `make unit`, 10 s and more."""

StartEngine = Callable[..., EngineProcess]

# A shell lets its background jobs ignore SIGINT, and their children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# By default hypothesis fails a test that takes longer than 0.2 s, even on a busy machine.
settings.register_profile("ours", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Skip a test if vLLM refuses its 8-bit floats on this CPU."""
    try:
        return (yield)
    except NotImplementedError as exc:
        if "requires x86 with AVX-512" not in str(exc):
            raise
        pytest.skip(str(exc))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; refuse tests that `make engines` or `make packaging` would not
    find."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item, (kind, places) in product(items, TESTS_OF.items()):
        is_found = item.nodeid.startswith(places)
        if item.get_closest_marker(kind) and not is_found:
            others = map(item.get_closest_marker, ("models", "faults", "nightly"))
            if not any(others):
                name = f"{kind.upper()}_TESTS"
                raise pytest.UsageError(f"{item.nodeid}: not in {name}, so no gate runs it")


def pytest_collection_finish() -> None:
    """Have vLLM, if a test has imported it, start no process for each model that it inspects."""
    if "vllm.model_executor.models.registry" in sys.modules:
        importlib.import_module("lab.model_inspection")


@pytest.fixture(scope="session")
def vlm() -> Path:
    """A small Qwen2.5-VL, made once per recipe and kept in .cache."""
    return model_cache.model(CACHE / "models")


@pytest.fixture(scope="session")
def other_vlm() -> Path:
    """The same shape as `vlm` with other weights."""
    return model_cache.model(CACHE / "models", seed=1)


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedFS]:
    """An S3 server for the whole run: take a prefix of your own under `seaweed.url`."""
    with SeaweedFS(LOGS) as server:
        yield server


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace `time.monotonic` by a clock that the test can advance."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.now_s)
    return clock


@pytest.fixture(scope="session")
def forks() -> Iterator[EngineForks]:
    """Start processes that have imported vLLM, one for each model runner, to fork engines from."""
    logs = LOGS / "forks"
    shutil.rmtree(logs, ignore_errors=True)
    with closing(engine_forks(logs)) as forks:
        yield forks


@contextmanager
def engines(logs: Path, model: Path, forks: EngineForks) -> Iterator[StartEngine]:
    """Yield a function that starts engines, which live as long as the block; see `engine`."""
    shutil.rmtree(logs, ignore_errors=True)
    default = model
    with ExitStack() as stack:

        def start(
            name: str,
            *arguments: str,
            model: Path = default,
            environment: Mapping[str, str] | None = None,
            runner: ModelRunner = "v1",
            python: str = sys.executable,
            as_users: bool = False,
        ) -> EngineProcess:
            process = EngineProcess(
                name,
                model,
                logs,
                (*SMALL_ENGINE, *arguments),
                {**(environment or {}), **(ON_V2 if runner == "v2" else {})},
                python=python,
                forks=None if as_users else forks,
            )
            return process.start_in(stack)

        yield start


@pytest.fixture(scope="session")
def plain(vlm: Path, forks: EngineForks) -> Iterator[EngineProcess]:
    """The engine without connectors that gives the expected tokens. All tests share it, so none may
    stop it. It may still be starting: call `wait_ready()` after all others have been started.
    """
    with engines(LOGS / "plain", vlm, forks) as start:
        yield start("plain")


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    """The model runner of the engines under test; see `tests.engines.runners`."""
    chosen: ModelRunner = getattr(request, "param", "v1")
    return chosen


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, vlm: Path, runner: ModelRunner, forks: EngineForks
) -> Iterator[StartEngine]:
    """Start engines that live as long as the test module, unless it stops them itself.

    `engine(name, *arguments, model=, environment=, runner=, python=, as_users=)` returns at once:
    start all, then call `wait_ready()` on each. Arguments are vLLM's, after those of SMALL_ENGINE.
    Tests of another `runner` get other engines. With `as_users` it starts as users start theirs;
    otherwise it is forked from `forks`, if they have one with its environment.
    """
    with engines(LOGS / f"{request.module.__name__}.{runner}", vlm, forks) as start:
        yield start
