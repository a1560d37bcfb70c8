# SPDX-License-Identifier: Apache-2.0
"""A plain engine that offloads its embeddings, and finds them again after a restart."""

import shutil
from pathlib import Path

import pytest

from lab.servers.engines import EngineProcess, ModelRunner, ec_argument
from tests.conftest import StartEngine
from tests.engines.chat import QUESTION, ask, counting, picture
from tests.engines.runners import on_each_runner
from tests.releases import needs_encoder_metrics

pytestmark = [pytest.mark.engine, pytest.mark.models, needs_encoder_metrics, on_each_runner]


def test_restarted_engine_loads_embeddings_from_before(
    engine: StartEngine, plain: EngineProcess, tmp_path: Path, runner: ModelRunner
) -> None:
    host = tmp_path / "host"
    option = ec_argument("both", str(tmp_path / "store"), host_cache_dir=str(host))
    offloading = engine("offloading", option, runner=runner)
    expected = tokens(plain.wait_ready())
    assert expected != ask(plain, plain.model, [picture(2), picture(1), QUESTION]).tokens
    assert run(offloading) == (expected, 2, 0)
    offloading.start()
    assert run(offloading) == (expected, 0, 2)
    shutil.rmtree(host)
    offloading.start()
    assert run(offloading) == (expected, 0, 2)


def run(engine: EngineProcess) -> tuple[list[int], int, int]:
    """Ask an engine that was just started, and stop it; return how much it encoded and loaded."""
    with counting(engine.wait_ready()) as gained:
        answer = tokens(engine)
    engine.stop()
    return answer, gained["ecshare_items/encoded"], gained["ecshare_items/loaded"]


def tokens(engine: EngineProcess) -> list[int]:
    return ask(engine, engine.model, [picture(1, "one"), picture(2, "two"), QUESTION]).tokens
