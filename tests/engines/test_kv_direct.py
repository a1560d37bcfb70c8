# SPDX-License-Identifier: Apache-2.0
"""P hands KV to D by NIXL, behind the router, and the store keeps it: equal tokens either way.

Needs nixl: `pip install --no-deps nixl nixl-cu12`, which also run without CUDA.
"""

import importlib.util
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lab.servers.engines import EngineProcess, kv_argument
from lab.servers.openai_client import counters
from lab.servers.processes import Port
from lab.servers.router import RouterProcess
from tests.conftest import LOGS, StartEngine
from tests.engines.chat import Answer, complete, counting, stored_kv

pytestmark = [
    pytest.mark.engine,
    pytest.mark.models,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed"),
]

LENGTH, ANSWER_TOKENS = 700, 12
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
SAVED, LOADED = "kvshare_blocks/saved", "kvshare_blocks/loaded"


class Pair(NamedTuple):
    plain: EngineProcess
    p: EngineProcess
    d: EngineProcess
    router: RouterProcess
    root: Path

    def asked(self, seed: int) -> tuple[Answer, Answer]:
        """Ask the router and the plain engine; return both answers."""
        prompt = [(seed * 37 + 7 * place + place // 9) % 200 + 20 for place in range(LENGTH)]
        own = complete(self.router, self.p.model, prompt, ANSWER_TOKENS)
        return own, complete(self.plain, self.plain.model, prompt, ANSWER_TOKENS)


def by_nixl(engine: EngineProcess) -> float:
    """Return how many bytes NIXL has brought to `engine`."""
    return counters(engine.base_url).get(("vllm:nixl_bytes_transferred_sum", ""), 0.0)


def num_answered(engine: EngineProcess) -> float:
    return counters(engine.base_url).get(("vllm:request_success_total", ""), 0.0)


@pytest.fixture(scope="module")
def pair(
    engine: StartEngine, plain: EngineProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("direct")

    def both(name: str) -> EngineProcess:
        ours = kv_argument("both", f"file://{root}/store", host_cache_dir=f"{root}/{name}-host")
        connectors = [NIXL, json.loads(ours.partition("=")[2])]
        multi = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": connectors},
        }
        environment = {
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(Port().number),
            "VLLM_SERVER_DEV_MODE": "1",
        }
        return engine(name, f"--kv-transfer-config={json.dumps(multi)}", environment=environment)

    p, d = both("p"), both("d")
    for each in (p, d, plain):
        each.wait_ready()
    stages = {"prefiller": [p], "decoder": [d]}
    with RouterProcess("router", LOGS, stages, ["--hand-over=direct"]) as router:
        yield Pair(plain, p, d, router, root)


def test_new_prompts_are_handed_over_by_nixl_and_stored_by_p(pair: Pair) -> None:
    for seed in range(3):
        before = len(stored_kv(pair.root, "t0of1"))
        num_bytes = by_nixl(pair.d)
        with counting(pair.d) as gained:
            own, expected = pair.asked(seed)
        assert own.tokens == expected.tokens
        assert by_nixl(pair.d) > num_bytes
        assert not gained[SAVED], "D stores what P stores"
        assert len(stored_kv(pair.root, "t0of1")) > before


def test_what_is_stored_is_loaded_without_p(pair: Pair) -> None:
    pair.asked(10)
    stored_kv(pair.root, "t0of1")
    reset = urllib.request.Request(f"{pair.d.base_url}/reset_prefix_cache", method="POST")
    urllib.request.urlopen(reset, timeout=30).close()
    num_bytes, num_of_p = by_nixl(pair.d), num_answered(pair.p)
    with counting(pair.d) as gained:
        own, expected = pair.asked(10)
    assert own.tokens == expected.tokens
    assert gained[LOADED] > 0
    assert by_nixl(pair.d) == num_bytes
    assert num_answered(pair.p) == num_of_p
