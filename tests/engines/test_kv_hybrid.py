# SPDX-License-Identifier: Apache-2.0
"""KV and recurrent states between engines of hybrid models: the tokens of a plain engine."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest

from lab import model_cache
from lab.servers.engine_forks import EngineForks
from lab.servers.engines import EngineProcess, ModelRunner, kv_argument
from tests.conftest import CACHE, LOGS, engines
from tests.engines.chat import Answer, complete, counting, is_certain, stored_kv
from tests.engines.runners import on_each_runner
from tests.releases import needs_offered_states
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, on_each_runner, needs_offered_states]

STATE_PART = "t0of1-s1"
# GDN kernels of a CPU take bfloat16 only. vLLM makes blocks of 640 tokens for this model; its CPU
# platform sets their size back to 128 for the scheduler if the user has not given it.
OPTIONS = {
    "lfm2": ("--dtype=float32",),
    "qwen3.5-text": ("--dtype=bfloat16", "--block-size=640"),
}
BLOCKS = {"lfm2": 128, "qwen3.5-text": 640}  # tokens, as vLLM chooses to fit a state
LENGTH = 1500
DAMAGE = ("lost", "corrupt", "swapped")


class Fleet(NamedTuple):
    plain: EngineProcess
    first: EngineProcess
    second: EngineProcess
    """Computes a prompt in many steps, in a cache that holds one and a half of the longest."""
    root: Path
    block: int

    def check(self, engine: EngineProcess, prompt: list[int], max_tokens: int = 12) -> Answer:
        """Ask `engine`; the tokens are those of the plain one."""
        answer = complete(engine, engine.model, prompt, max_tokens)
        assert answer.tokens == complete(self.plain, self.plain.model, prompt, max_tokens).tokens
        return answer

    def store(self, prompt: list[int], max_tokens: int = 12) -> Answer:
        """Ask the first engine, and return when all KV is stored."""
        answer = self.check(self.first, prompt, max_tokens)
        stored_kv(self.root, "t0of1")
        return answer

    def last_boundary(self, prompt: list[int]) -> int:
        """Return after how many tokens the last state is that this prompt can load."""
        return (len(prompt) - 1) // self.block * self.block


def prompt_of(number: int, length: int = LENGTH) -> list[int]:
    """Return a prompt of ordinary tokens, another one for each number."""
    return [(7 * place * (number + 3) + place // 9) % 200 + 20 for place in range(length)]


@pytest.fixture(
    scope="module",
    params=["lfm2", pytest.param("qwen3.5-text", marks=pytest.mark.models)],
)
def fleet(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    runner: ModelRunner,
    forks: EngineForks,
) -> Iterator[Fleet]:
    """The engines of one model; they end before those of the next one start."""
    family: str = request.param
    root = tmp_path_factory.mktemp(family)
    options = OPTIONS[family]

    def sharing(name: str) -> str:
        own = {"host_cache_dir": f"{root}/{name}-host"}
        return kv_argument("both", f"file://{root}/store", **own)

    model = model_cache.model(CACHE / "models", family)
    with engines(LOGS / f"{__name__}.{family}.{runner}", model, forks) as start:
        plain = start("plain", *options)
        first = start("first", *options, sharing("first"), runner=runner)
        small = ("--max-num-batched-tokens=768", "--num-gpu-blocks-override=40")
        second = start("second", *options, *small, sharing("second"), runner=runner)
        for engine in (plain, first, second):
            engine.wait_ready()
        yield Fleet(plain, first, second, root, BLOCKS[family])


def test_second_engine_computes_less_than_a_block(fleet: Fleet) -> None:
    prompt = prompt_of(1)
    assert fleet.store(prompt).num_cached_tokens == 0
    with counting(fleet.second) as gained:
        warm = fleet.check(fleet.second, prompt)
    assert warm.num_cached_tokens == fleet.last_boundary(prompt)
    assert gained["kvshare_tokens/loaded"] == warm.num_cached_tokens


def test_next_turn_continues_from_the_state_of_the_last(fleet: Fleet) -> None:
    talk = prompt_of(2)
    talk += fleet.store(talk).tokens
    talk += prompt_of(3, 40)
    turn = fleet.check(fleet.second, talk)
    assert turn.num_cached_tokens == fleet.last_boundary(prompt_of(2))


def test_prompt_that_diverges_before_the_stored_state_is_computed(fleet: Fleet) -> None:
    fleet.store(prompt_of(4))
    other = [*prompt_of(4)[: fleet.block], *prompt_of(5)]
    assert fleet.check(fleet.second, other).num_cached_tokens == 0


def test_prompt_of_whole_blocks_is_loaded_except_for_the_last(fleet: Fleet) -> None:
    prompt = prompt_of(6, 2 * fleet.block)
    fleet.store(prompt)
    assert fleet.check(fleet.second, prompt).num_cached_tokens == fleet.block


def test_concurrent_requests_get_their_own_states(fleet: Fleet) -> None:
    # Few answers in bfloat16 are certain: three prompts of a hundred.
    candidates = (prompt_of(number) for number in range(100, 200))
    prompts = list(islice(filter(partial(is_certain, fleet.plain), candidates), 3))
    assert len(prompts) == 3
    for prompt in prompts:
        fleet.store(prompt)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(partial(complete, fleet.second, fleet.second.model), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == complete(fleet.plain, fleet.plain.model, prompt).tokens


@pytest.mark.models
def test_restarted_engine_loads_states_from_before(fleet: Fleet) -> None:
    prompt = prompt_of(8)
    fleet.store(prompt)
    fleet.first.stop()
    fleet.first.start()
    with counting(fleet.first.wait_ready()) as gained:
        assert fleet.check(fleet.first, prompt).num_cached_tokens == fleet.last_boundary(prompt)
    assert gained["kvshare_tokens/loaded"] == fleet.last_boundary(prompt)


@pytest.mark.parametrize("damage", DAMAGE)
def test_prompt_without_a_sound_state_is_computed_and_stored_again(
    fleet: Fleet, damage: str
) -> None:
    number = 30 + 2 * DAMAGE.index(damage)
    prompts = [prompt_of(number), prompt_of(number + 1)]
    stored = []
    for prompt in prompts:
        before = stored_kv(fleet.root, STATE_PART)
        fleet.check(fleet.first, prompt)
        stored.append(sorted(stored_kv(fleet.root, STATE_PART) - before))
    own, others = stored
    shutil.rmtree(fleet.root / "second-host")
    for path, other in zip(own, others, strict=True):
        content = path.read_bytes()
        path.unlink()
        if damage == "corrupt":
            path.write_bytes(content[:-8] + bytes(each ^ 255 for each in content[-8:]))
        elif damage == "swapped":
            path.write_bytes(other.read_bytes())
    assert fleet.check(fleet.second, prompts[0]).num_cached_tokens == 0
    wait_until(lambda: all(path.exists() for path in own), 60.0, "a lost state is not stored again")
