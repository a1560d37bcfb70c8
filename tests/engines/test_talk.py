# SPDX-License-Identifier: Apache-2.0
"""A conversation with pictures, over encode, prefill and decode engines and the router.

Each turn's prompt is all that was said before and something new. Whichever prefill engine takes it
finds the earlier prompts, and the answers too, which the decode engine has saved.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab.servers import openai_client as client
from lab.servers.engine_forks import EngineForks
from lab.servers.engines import EngineProcess, ModelRunner, ec_argument, kv_argument
from lab.servers.processes import Server
from lab.servers.router import RouterProcess
from tests.conftest import LOGS, engines
from tests.engines.chat import ask, picture, text
from tests.engines.runners import on_each_runner
from tests.releases import HAS_ENCODER_METRICS

pytestmark = [pytest.mark.engine, pytest.mark.models, on_each_runner]  # minutes: not in the gate

BLOCK = 32
ANSWER_TOKENS = 45
COMPUTED = ("vllm:prompt_tokens_by_source_total", "local_compute")
ENCODED = ("ecshare_items_total", "encoded")
# Pictures come in the first turn, in the third, and the first one again in the fourth.
QUESTIONS: list[list[dict[str, Any]]] = [
    [picture(1), text("Describe this picture. How many people are there? " * 4)],
    [text("Which colour is the largest shape? Answer in one sentence.")],
    [picture(2), text("Compare the first picture with the second picture.")],
    [picture(1), text("What is the difference between these pictures?")],
    [text("Tell me a story about the sea, the wind and the stars.")],
]


class Fleet(NamedTuple):
    plain: EngineProcess
    encoder: EngineProcess
    first: EngineProcess
    second: EngineProcess
    decoder: EngineProcess
    store: Path

    @property
    def prefillers(self) -> tuple[EngineProcess, EngineProcess]:
        return self.first, self.second

    def router(self) -> RouterProcess:
        return RouterProcess(
            "router",
            LOGS / __name__,
            {
                "encoder": [self.encoder],
                "prefiller": self.prefillers,
                "decoder": [self.decoder],
            },
            # Beside P, D may answer first: P's request is cancelled then, and vLLM counts none of
            # it.
            options=("--hand-over=after", "--prefill=always", "--balance=load"),
        )

    def wait_stored(self) -> None:
        """Return when nothing has been added to the store for a while."""
        before, now = -1, 0
        while before < now:
            time.sleep(1.0)
            before, now = now, sum(1 for path in self.store.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def fleet(
    vlm: Path, tmp_path_factory: pytest.TempPathFactory, runner: ModelRunner, forks: EngineForks
) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("talk")
    url = f"file://{root}/store"
    shape = (f"--block-size={BLOCK}", "--num-gpu-blocks-override=256")

    with engines(LOGS / f"{__name__}.{runner}", vlm, forks) as start:

        def consumer(name: str) -> EngineProcess:
            # A host cache of its own, so its hits come from the store.
            host = f"{root}/{name}-host"
            kv = kv_argument("both", url, host_cache_dir=host, chunk_tokens=2 * BLOCK)
            ec = ec_argument("consumer", url, host_cache_dir=host)
            return start(name, *shape, kv, ec, runner=runner)

        encoder = ec_argument("producer", url, host_cache_dir=f"{root}/encode-host")
        fleet = Fleet(
            start("plain", *shape),
            start("encode", encoder),
            consumer("prefill-1"),
            consumer("prefill-2"),
            consumer("decode"),
            root / "store",
        )
        for engine in fleet[:5]:
            engine.wait_ready()
        yield fleet


@contextmanager
def counting(*servers: Server) -> Iterator[list[Counter[tuple[str, str]]]]:
    """What each server counted inside the block; filled in when it ends."""
    gained: list[Counter[tuple[str, str]]] = []
    before = [client.counters(server.base_url) for server in servers]
    yield gained
    for server, known in zip(servers, before, strict=True):
        after = client.counters(server.base_url)
        gained.append(Counter({name: int(n - known.get(name, 0)) for name, n in after.items()}))


def test_conversation_of_five_turns_gives_the_plain_tokens(fleet: Fleet) -> None:
    messages: list[dict[str, Any]] = []
    num_said = 0  # tokens of the latest prompt and its answer
    taken = [0, 0]
    with fleet.router() as router:
        for turn, question in enumerate(QUESTIONS):
            messages.append({"role": "user", "content": question})
            more = {"messages": messages, "max_tokens": ANSWER_TOKENS}
            expected = ask(fleet.plain, fleet.plain.model, [], **more)
            with counting(*fleet.prefillers, fleet.decoder, fleet.encoder) as gained:
                answer = ask(router, fleet.plain.model, [], **more)
            assert answer.tokens == expected.tokens, f"turn {turn + 1}"
            first, second, decoder, encoder = gained
            # The last token of an answer is sampled, not computed.
            stored = max(0, num_said - 1) // BLOCK * BLOCK
            assert first[COMPUTED] + second[COMPUTED] == answer.num_prompt_tokens - stored
            assert decoder[COMPUTED] == 1
            if HAS_ENCODER_METRICS:
                assert encoder[ENCODED] == (turn in (0, 2)), "a picture is encoded once"
            taken = [taken[0] + bool(first[COMPUTED]), taken[1] + bool(second[COMPUTED])]
            said = answer.body["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": said})
            num_said = answer.num_prompt_tokens + len(answer.tokens)
            fleet.wait_stored()
    assert all(taken), "both prefill engines took turns"
