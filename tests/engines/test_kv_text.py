# SPDX-License-Identifier: Apache-2.0
"""KV between engines of a text-only model, without any encoder-cache connector.

Such a model can take LoRA adapters, and is quick enough to guess ahead of.
"""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from lab import model_cache
from lab.models import make_adapter
from lab.servers.engine_forks import EngineForks
from lab.servers.engines import EngineProcess, ModelRunner, kv_argument
from lab.servers.openai_client import counters
from lab.servers.processes import Server
from lab.servers.router import RouterProcess
from tests.conftest import CACHE, LOGS, engines
from tests.engines.chat import Answer, ask, complete, counting, counts, stored_kv, text
from tests.engines.runners import on_each_runner
from tests.releases import CAN_GUESS, needs_guesses
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, on_each_runner]

BLOCK = 32
STORY = "Tell me a story about the sea, the wind and the stars, and of an old stone house. " * 8
# The same few tokens repeat, so that n-gram drafts have something to propose.
REFRAIN = [40, 41, 42, 43, 44, 45, 46] * 30
ADAPTERS = ("--enable-lora", "--max-lora-rank=8", "--max-loras=2", "--max-cpu-loras=8")
GUESSING = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
MAY_BE_CHANGED = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}


class Fleet(NamedTuple):
    plain: EngineProcess
    first: EngineProcess
    second: EngineProcess
    """Runs without a prefix cache."""
    guessing: EngineProcess
    """Decodes speculatively, where vLLM can."""
    root: Path

    def check(self, engine: EngineProcess, words: str, lora: str = "", like: str = "") -> Answer:
        """Ask `engine`; the tokens are those of the plain one, with its adapter `like`."""
        answer = ask(engine, lora or engine.model, [text(words)])
        assert answer.tokens == ask(self.plain, like or self.plain.model, [text(words)]).tokens
        self.wait_stored()
        return answer

    def wait_stored(self) -> None:
        """Return when all KV is stored, so that other engines can load it."""
        stored_kv(self.root, "t0of1")

    def load(self, name: str, seed: int, *servers: EngineProcess) -> Path:
        """Write an adapter, over the one of this name, and have engines load it."""
        path = make_adapter(self.root / name, Path(self.plain.model), seed)
        for server in servers:
            post(server, "v1/load_lora_adapter", lora_name=name, lora_path=str(path))
        return path


def post(server: Server, path: str, **body: str) -> bytes:
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(
        f"{server.base_url}/{path}", json.dumps(body).encode(), headers, method="POST"
    )
    with urllib.request.urlopen(asked, timeout=120) as reply:
        said: bytes = reply.read()
        return said


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, runner: ModelRunner, forks: EngineForks
) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("text")
    shape = (f"--block-size={BLOCK}", "--num-gpu-blocks-override=256", "--limit-mm-per-prompt={}")

    def sharing(name: str) -> str:
        own = {"host_cache_dir": f"{root}/{name}-host", "chunk_tokens": 2 * BLOCK}
        return kv_argument("both", f"file://{root}/store", **own)

    guesses = (f"--speculative-config={json.dumps(GUESSING)}",) if CAN_GUESS else ()
    model = model_cache.model(CACHE / "models", "qwen2")
    with engines(LOGS / f"{__name__}.{runner}", model, forks) as start:
        fleet = Fleet(
            start("plain", *shape, *ADAPTERS, environment=MAY_BE_CHANGED),
            start(
                *("first", *shape, *ADAPTERS, sharing("first")),
                environment=MAY_BE_CHANGED,
                runner=runner,
            ),
            start(
                *("second", *shape, *ADAPTERS, sharing("second"), "--no-enable-prefix-caching"),
                environment=MAY_BE_CHANGED,
                runner=runner,
            ),
            # On V1: Triton's interpreter cannot run V2's kernel for n-gram guesses (0.32).
            start("guessing", *shape, *guesses, sharing("guessing")),
            root,
        )
        for engine in fleet[:4]:
            engine.wait_ready()
        yield fleet


def test_second_engine_computes_one_token(fleet: Fleet) -> None:
    with counting(fleet.first) as gained:
        cold = fleet.check(fleet.first, STORY)
    assert cold.num_cached_tokens == 0
    assert gained["kvshare_tokens/queried"] == cold.num_prompt_tokens
    for engine in (fleet.second, fleet.guessing):
        warm = fleet.check(engine, STORY)
        assert warm.num_cached_tokens == warm.num_prompt_tokens - 1


def test_engine_without_a_prefix_cache_loads_its_own_kv(fleet: Fleet) -> None:
    assert fleet.check(fleet.second, f"mine {STORY}").num_cached_tokens == 0
    warm = fleet.check(fleet.second, f"mine {STORY}")
    assert warm.num_cached_tokens == warm.num_prompt_tokens - 1


# --- LoRA adapters ---


def test_adapter_kv_is_shared_with_the_same_adapter_only(fleet: Fleet) -> None:
    words = f"adapted {STORY}"
    fleet.load("shared", 1, fleet.plain, fleet.first, fleet.second)
    fleet.check(fleet.first, words, "shared", like="shared")
    bare = fleet.check(fleet.second, words)
    assert bare.num_cached_tokens == 0
    warm = fleet.check(fleet.second, words, "shared", like="shared")
    assert warm.num_cached_tokens == warm.num_prompt_tokens - 1
    assert warm.tokens != bare.tokens


def test_retrained_adapter_of_the_same_name_finds_no_old_kv(fleet: Fleet) -> None:
    words = f"trained further {STORY}"
    fleet.load("tuned", 2, fleet.first)
    fleet.load("before", 2, fleet.plain)
    old = fleet.check(fleet.first, words, "tuned", like="before")
    fleet.load("tuned", 3, fleet.second)
    fleet.load("after", 3, fleet.plain)
    new = fleet.check(fleet.second, words, "tuned", like="after")
    assert new.num_cached_tokens == 0
    assert new.tokens != old.tokens
    again = fleet.check(fleet.second, words, "tuned", like="after")
    assert again.num_cached_tokens == again.num_prompt_tokens - 1


def test_adapter_without_files_is_not_shared(fleet: Fleet) -> None:
    path = fleet.load("gone", 4, fleet.plain, fleet.first)
    for file in path.iterdir():
        file.unlink()
    with counting(fleet.first) as gained:
        fleet.check(fleet.first, f"gone {STORY}", "gone", like="gone")
    assert gained["kvshare_blocks/missed"] > 0
    assert gained["kvshare_tokens/queried"] == 0


def test_router_sends_requests_to_engines_with_the_adapter(fleet: Fleet) -> None:
    """KV that one engine has computed with the adapter is loaded by the other."""
    words, name = f"moving {STORY}", "moving"
    decoders = {"decoder": [fleet.first, fleet.second]}
    with RouterProcess("router", LOGS / __name__, decoders) as router:
        router.wait_ready()

        def wait_listed(*, there: bool) -> None:
            wait_until(lambda: (name in listed(router)) is there, pause_s=0.2)

        fleet.load(name, 5, fleet.plain, fleet.first)
        wait_listed(there=True)
        expected = ask(fleet.plain, name, [text(words)]).tokens
        with counting(fleet.first) as computed:
            assert ask(router, name, [text(words)]).tokens == expected
        assert computed["kvshare_tokens/queried"] > 0
        fleet.wait_stored()
        post(fleet.first, "v1/unload_lora_adapter", lora_name=name)
        wait_listed(there=False)
        refused = ask(router, name, [text(words)])
        assert refused.status == 404
        assert refused.body["error"]["param"] == "model"
        fleet.load(name, 5, fleet.second)
        wait_listed(there=True)
        with counting(fleet.second) as loaded:
            assert ask(router, name, [text(words)]).tokens == expected
        assert loaded["kvshare_tokens/loaded"] > 0


def listed(server: Server) -> set[str]:
    with urllib.request.urlopen(f"{server.base_url}/v1/models", timeout=30) as reply:
        return {each["id"] for each in json.load(reply)["data"]}


# --- speculative decoding ---


@needs_guesses
def test_rejected_draft_tokens_are_not_stored(fleet: Fleet) -> None:
    """Rejected tokens are overwritten in the cache; no stored object may hold them."""
    talk = REFRAIN
    for turn in range(3):
        answer = complete(fleet.guessing, fleet.guessing.model, talk, max_tokens=90)
        assert answer.tokens == complete(fleet.plain, fleet.plain.model, talk, 90).tokens
        fleet.wait_stored()
        talk = [*talk, *answer.tokens]
        stored = (len(talk) - 1) // BLOCK * BLOCK
        talk += [60 + turn] * 3
        other = complete(fleet.second, fleet.second.model, talk, max_tokens=20)
        assert other.tokens == complete(fleet.plain, fleet.plain.model, talk, 20).tokens
        assert other.num_cached_tokens >= stored
    guesses = counters(fleet.guessing.base_url)
    accepted = guesses["vllm:spec_decode_num_accepted_tokens_total", ""]
    assert 0 < accepted < guesses["vllm:spec_decode_num_draft_tokens_total", ""]


# --- resets ---


def test_reset_prefix_cache_is_refilled_from_the_store(fleet: Fleet) -> None:
    fleet.check(fleet.first, f"reset {STORY}")
    assert json.loads(post(fleet.first, "reset_prefix_cache?reset_external=true"))["success"]
    before = counts(fleet.first)["kvshare_tokens/loaded"]
    warm = fleet.check(fleet.first, f"reset {STORY}")
    assert counts(fleet.first)["kvshare_tokens/loaded"] - before == warm.num_prompt_tokens - 1


def test_requests_running_during_a_reset_give_the_same_tokens(fleet: Fleet) -> None:
    """vLLM preempts the requests, and their blocks leave the prefix cache."""
    words = [f"{number} running {STORY[:300]}" for number in range(4)]
    expected = [
        ask(fleet.plain, fleet.plain.model, [text(each)], max_tokens=300).tokens for each in words
    ]
    given: dict[int, list[int]] = {}

    def run(number: int) -> None:
        answer = ask(fleet.first, fleet.first.model, [text(words[number])], max_tokens=300)
        given[number] = answer.tokens

    clients = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for client in clients:
        client.start()
    for _ in range(20):  # on a slow machine more would keep the requests from ending at all
        with suppress(urllib.error.HTTPError):  # vLLM refuses while a request loads
            post(fleet.first, "reset_prefix_cache?reset_running_requests=true&reset_external=true")
        time.sleep(0.1)  # they take a second
    for client in clients:
        client.join()
    assert [given[number] for number in range(4)] == expected
    assert counters(fleet.first.base_url)["vllm:num_preemptions_total", ""] > 0
