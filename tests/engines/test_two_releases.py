# SPDX-License-Identifier: Apache-2.0
"""An engine of another vLLM release on the same store, as in an upgrade of a fleet.

`make test-matrix` runs this for the releases it has: OTHER_PYTHON is the other one's interpreter.
"""

import os
import subprocess
from pathlib import Path

import pytest

from kvshare.compat import layout_generation
from lab.servers.engines import EngineProcess, kv_argument
from tests.conftest import StartEngine
from tests.engines.chat import ask, stored_kv, text

OTHER_PYTHON = os.environ.get("ECSHARE_TEST_OTHER_PYTHON", "")
STORY = "Tell me a story about the sea, the wind and the stars, and of an old stone house. " * 8
DIFFERS = "the most similar other namespace differs in"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not OTHER_PYTHON, reason="make test-matrix names another release"),
]


def other_generation() -> str:
    tell = "from kvshare.compat import layout_generation as told; print(told())"
    said = subprocess.run([OTHER_PYTHON, "-c", tell], capture_output=True, text=True, check=True)
    return said.stdout.splitlines()[-1]


def test_engines_of_two_releases_share_or_log_why_not(engine: StartEngine, tmp_path: Path) -> None:
    """Each release computes a prompt that the other then loads. Equal tokens show that the
    kernels of both read a block alike.
    """
    share = other_generation() == layout_generation()

    def started(name: str, **python: str) -> EngineProcess:
        own = {"host_cache_dir": f"{tmp_path}/{name}-host"}
        begun = engine(name, kv_argument("both", f"file://{tmp_path}/store", **own), **python)
        return begun.wait_ready()

    other, this = started("other", python=OTHER_PYTHON), started("this")
    for turn, (first, second) in enumerate(((other, this), (this, other))):
        content = [text(f"{turn} {STORY}")]
        before = stored_kv(tmp_path, "t0of1")
        cold = ask(first, first.model, content)
        assert stored_kv(tmp_path, "t0of1") > before
        found = ask(second, second.model, content)
        assert found.tokens == cold.tokens
        assert found.num_cached_tokens == (found.num_prompt_tokens - 1 if share else 0)
    assert (DIFFERS in this.log_path.read_text()) is not share
