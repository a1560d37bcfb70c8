# SPDX-License-Identifier: Apache-2.0
"""An engine of another vLLM release on the same store, as in an upgrade of a fleet.

`make test-matrix` runs this for the releases it has: OTHER_PYTHON is the other one's interpreter.
"""

import os
import subprocess
from pathlib import Path

import pytest

from kvshare import compat
from lab import model_cache
from lab.servers.engines import EngineProcess, kv_argument
from tests.conftest import CACHE, StartEngine
from tests.engines.chat import complete, stored_kv
from tests.releases import TRIES_HYBRIDS

OTHER_PYTHON = os.environ.get("ECSHARE_TEST_OTHER_PYTHON", "")
LENGTH = 700
DIFFERS = "the most similar other namespace differs in"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not OTHER_PYTHON, reason="make test-matrix names another release"),
]


def other(expression: str) -> str:
    """Return the value of an expression with the other release; `compat` is `kvshare.compat`."""
    tell = f"from kvshare import compat; from tests import releases; print({expression})"
    said = subprocess.run([OTHER_PYTHON, "-c", tell], capture_output=True, text=True, check=True)
    return said.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("family", "part", "num_loaded"),
    [("qwen2.5-vl", "t0of1", LENGTH - 1), ("lfm2", "t0of1-s1", 0)],
)
def test_engines_of_two_releases_share_or_log_why_not(
    engine: StartEngine, tmp_path: Path, family: str, part: str, num_loaded: int
) -> None:
    """Each release computes a prompt that the other then loads. Equal tokens show that the
    kernels of both read a block alike. States, whose kernels cannot be tried, are computed.
    """
    is_hybrid = family == "lfm2"
    if is_hybrid and not (TRIES_HYBRIDS and other("releases.TRIES_HYBRIDS") == "True"):
        pytest.skip("one of the two is a release with which recurrent layers are not tried")
    is_one_namespace = other("compat.layout_generation()") == compat.layout_generation()
    model = model_cache.model(CACHE / "models", family)

    def started(name: str, **python: str) -> EngineProcess:
        own = {"host_cache_dir": f"{tmp_path}/{name}-host"}
        sharing = kv_argument("both", f"file://{tmp_path}/store", **own)
        return engine(f"{name}-{family}", sharing, model=model, **python).wait_ready()

    old, this = started("other", python=OTHER_PYTHON), started("this")
    for turn, (first, second) in enumerate(((old, this), (this, old))):
        prompt = [(7 * place * (turn + 3) + place // 9) % 200 + 20 for place in range(LENGTH)]
        before = stored_kv(tmp_path, part)
        cold = complete(first, first.model, prompt)
        assert stored_kv(tmp_path, part) > before
        found = complete(second, second.model, prompt)
        assert found.tokens == cold.tokens
        assert found.num_cached_tokens == (num_loaded if is_one_namespace else 0)
    assert (DIFFERS in this.log_path.read_text()) is not is_one_namespace
    for each in (old, this):
        each.stop()  # four at once would need 12 GB
