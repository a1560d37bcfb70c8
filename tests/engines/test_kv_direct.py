# SPDX-License-Identifier: Apache-2.0
"""P hands KV to D by NIXL, behind the router, and the store keeps it: equal tokens either way.

Needs nixl, which also runs without CUDA: `make test-direct` installs it. Its first transfers take
seconds on CPUs.
"""

import importlib.util
import json
import urllib.request
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ecshare.router.stages import plan
from lab import model_cache
from lab.servers.engine_forks import EngineForks
from lab.servers.engines import EngineProcess, kv_argument
from lab.servers.openai_client import counters
from lab.servers.processes import Port
from lab.servers.router import RouterProcess
from tests.conftest import CACHE, LOGS, StartEngine, engines
from tests.engines.chat import Answer, complete, counting, is_certain, stored_kv, wait_until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.models,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed"),
]

LENGTH, ANSWER_TOKENS = 700, 12
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
SAVED, LOADED = "kvshare_blocks/saved", "kvshare_blocks/loaded"


class Fleet(NamedTuple):
    plain: EngineProcess
    p: EngineProcess
    d: EngineProcess
    second_d: EngineProcess
    router: RouterProcess
    root: Path

    def asked(self, seed: int) -> tuple[Answer, Answer]:
        """Ask the router and the plain engine; return both answers."""
        prompt = prompt_of(seed)
        own = complete(self.router, self.p.model, prompt, ANSWER_TOKENS)
        return own, self.expected(prompt)

    def expected(self, prompt: list[int]) -> Answer:
        return complete(self.plain, self.plain.model, prompt, ANSWER_TOKENS)

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Have P compute a prompt and keep it, as the router does; return what it tells D."""
        answer = complete(self.p, self.p.model, prompt, 1, kv_transfer_params=plan.DIRECT)
        assert answer.status == 200, answer.body
        params: dict[str, Any] = answer.body["kv_transfer_params"]
        assert params["do_remote_prefill"], "P hands over"
        return params

    def decode(self, prompt: list[int], params: dict[str, Any]) -> Answer:
        """Have D answer a prompt with what P has told."""
        return complete(self.d, self.d.model, prompt, ANSWER_TOKENS, kv_transfer_params=params)

    def serves_as_before(self, seed: int) -> None:
        """Ask for a new prompt by way of the router; P hands it over directly."""
        before = by_nixl(self.d) + by_nixl(self.second_d)
        own, expected = self.asked(seed)
        assert own.tokens == expected.tokens
        assert by_nixl(self.d) + by_nixl(self.second_d) > before


def prompt_of(seed: int, length: int = LENGTH) -> list[int]:
    return [(seed * 37 + 7 * place + place // 9) % 200 + 20 for place in range(length)]


def by_nixl(engine: EngineProcess) -> float:
    """Return how many bytes NIXL has brought to `engine`."""
    return counters(engine.base_url).get(("vllm:nixl_bytes_transferred_sum", ""), 0.0)


def num_answered(engine: EngineProcess) -> float:
    return counters(engine.base_url).get(("vllm:request_success_total", ""), 0.0)


def num_expired(engine: EngineProcess) -> float:
    """Return how many prompts `engine` no longer keeps for a reader that has not come."""
    return counters(engine.base_url).get(("vllm:nixl_num_kv_expired_reqs_total", ""), 0.0)


def reset(engine: EngineProcess) -> None:
    """Have `engine` forget the KV in its own memory."""
    request = urllib.request.Request(f"{engine.base_url}/reset_prefix_cache", method="POST")
    urllib.request.urlopen(request, timeout=30).close()


def with_nixl(engine: StartEngine, name: str, root: Path, *arguments: str) -> EngineProcess:
    """Start an engine that has NIXL beside the store in `root`."""
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
    argument = f"--kv-transfer-config={json.dumps(multi)}"
    return engine(name, *arguments, argument, environment=environment)


@pytest.fixture(scope="module")
def fleet(
    engine: StartEngine, plain: EngineProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("direct")
    p = with_nixl(engine, "p", root, "--num-gpu-blocks-override=40")
    d, second_d = with_nixl(engine, "d", root), with_nixl(engine, "second-d", root)
    for each in (p, d, second_d, plain):
        each.wait_ready()
    stages = {"prefiller": [p], "decoder": [d, second_d]}
    with RouterProcess("router", LOGS, stages, ["--hand-over=direct"]) as router:
        yield Fleet(plain, p, d, second_d, router, root)


def test_new_prompts_are_handed_over_by_nixl_and_stored_by_p(fleet: Fleet) -> None:
    for seed in range(4):
        before = len(stored_kv(fleet.root, "t0of1"))
        with counting(fleet.d) as first, counting(fleet.second_d) as second:
            fleet.serves_as_before(seed)
        assert not first[SAVED] + second[SAVED], "D stores what P stores"
        assert len(stored_kv(fleet.root, "t0of1")) > before
    assert by_nixl(fleet.d)
    assert by_nixl(fleet.second_d)


def test_what_is_stored_is_loaded_without_p(fleet: Fleet) -> None:
    fleet.asked(10)
    stored_kv(fleet.root, "t0of1")
    reset(fleet.d)
    reset(fleet.second_d)
    num_bytes, num_of_p = by_nixl(fleet.d) + by_nixl(fleet.second_d), num_answered(fleet.p)
    with counting(fleet.d) as first, counting(fleet.second_d) as second:
        own, expected = fleet.asked(10)
    assert own.tokens == expected.tokens
    assert first[LOADED] + second[LOADED] > 0
    assert by_nixl(fleet.d) + by_nixl(fleet.second_d) == num_bytes
    assert num_answered(fleet.p) == num_of_p


def test_after_the_lease_what_d_reads_is_stored_by_nobody(fleet: Fleet) -> None:
    """vLLM reports no error, and D may answer with another prompt's KV. The store has P's."""
    prompt = prompt_of(20)
    num_before = num_expired(fleet.p)
    params = fleet.prefill(prompt)
    stored_kv(fleet.root, "t0of1")
    wait_until(lambda: num_expired(fleet.p) > num_before, "the lease never ends", 120)
    for seed in range(21, 30):  # P's memory has other prompts now
        complete(fleet.p, fleet.p.model, prompt_of(seed), 1)
    with counting(fleet.d) as gained:
        assert fleet.decode(prompt, params).status == 200
    assert not gained[SAVED]
    reset(fleet.d)
    assert fleet.decode(prompt, {}).tokens == fleet.expected(prompt).tokens
    fleet.serves_as_before(30)


def test_a_lease_that_ends_costs_nothing_while_p_has_the_prompt(fleet: Fleet) -> None:
    prompt = prompt_of(31)
    num_before = num_expired(fleet.p)
    params = fleet.prefill(prompt)
    wait_until(lambda: num_expired(fleet.p) > num_before, "the lease never ends", 120)
    with counting(fleet.d) as gained:
        assert fleet.decode(prompt, params).tokens == fleet.expected(prompt).tokens
    assert not gained[SAVED]


def test_p_that_dies_after_its_answer_costs_time_alone(fleet: Fleet) -> None:
    prompt = prompt_of(40)
    params = fleet.prefill(prompt)
    stored_kv(fleet.root, "t0of1")
    fleet.p.kill()
    with counting(fleet.d) as gained:
        assert fleet.decode(prompt, params).tokens == fleet.expected(prompt).tokens
    assert gained[LOADED] > 0
    own, expected = fleet.asked(41)  # without P
    assert own.tokens == expected.tokens
    fleet.p.start()
    fleet.p.wait_ready()
    wait_until(lambda: fleet.router._answers(), "the router never finds P", 60)
    fleet.serves_as_before(42)


def test_d_that_starts_again_before_it_reads(fleet: Fleet) -> None:
    prompt = prompt_of(50)
    params = fleet.prefill(prompt)
    fleet.d.kill()
    fleet.d.start()
    fleet.d.wait_ready()
    assert fleet.decode(prompt, params).tokens == fleet.expected(prompt).tokens
    fleet.serves_as_before(51)


def test_a_second_d_answers_when_the_first_is_gone(fleet: Fleet) -> None:
    fleet.d.kill()
    for seed in range(60, 63):
        own, expected = fleet.asked(seed)
        assert own.tokens == expected.tokens
    fleet.d.start()
    fleet.d.wait_ready()
    fleet.serves_as_before(63)


def test_a_store_that_fails_does_not_hinder_nixl(fleet: Fleet) -> None:
    store = fleet.root / "store"
    store.rename(fleet.root / "away")
    store.write_text("no folder")
    for seed in range(70, 73):
        fleet.serves_as_before(seed)
    prompt = prompt_of(73)
    params = fleet.prefill(prompt)
    fleet.p.kill()
    answer = fleet.decode(prompt, params)
    assert answer.tokens == fleet.expected(prompt).tokens, "D has computed it"


def test_hybrid_is_handed_over_with_its_states(
    tmp_path_factory: pytest.TempPathFactory, forks: EngineForks
) -> None:
    """NIXL of vLLM 0.32 hands over the states of GDN layers; those of LFM2 it refuses at start."""
    root = tmp_path_factory.mktemp("direct-hybrid")
    model = model_cache.model(CACHE / "models", "qwen3.5-text")
    # GDN kernels of a CPU take bfloat16 only, with which few answers are certain.
    options = ("--dtype=bfloat16", "--block-size=640")
    with engines(LOGS / f"{__name__}.hybrid", model, forks) as engine:
        plain = engine("plain", *options)
        p, d = (with_nixl(engine, name, root, *options) for name in ("p", "d"))
        for each in (plain, p, d):
            each.wait_ready()
        prompts = (prompt_of(seed, length) for seed in range(100) for length in (1500, 2000))
        certain = [*islice(filter(partial(is_certain, plain), prompts), 2)]
        assert len(certain) == 2
        stages = {"prefiller": [p], "decoder": [d]}
        with RouterProcess("router", LOGS, stages, ["--hand-over=direct"]) as router:
            for prompt in certain:
                before = by_nixl(d)
                own = complete(router, p.model, prompt, ANSWER_TOKENS)
                assert own.tokens == complete(plain, p.model, prompt, ANSWER_TOKENS).tokens
                assert by_nixl(d) > before
