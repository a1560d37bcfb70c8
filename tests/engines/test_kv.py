# SPDX-License-Identifier: Apache-2.0
"""KV blocks between real engines: one computes them, another loads them; the tokens are equal."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab.servers.engines import EngineProcess, ModelRunner, kv_argument
from lab.servers.openai_client import counters
from tests.conftest import StartEngine
from tests.engines.chat import (
    FOR_DECODE,
    Answer,
    ask,
    begin,
    complete,
    counts,
    picture,
    stored_kv,
    text,
    wait_for_requests,
)
from tests.engines.runners import on_each_runner
from tests.kv_events import Subscriber
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, on_each_runner]

BLOCK = 32
CHUNK = 2 * BLOCK
STORY = "Tell me a story about the sea, the wind and the stars, and of an old stone house. " * 8
PICTURES = [picture(1, "one"), picture(2, "two"), text("what is to be seen here, and where?")]


class Fleet(NamedTuple):
    plain: EngineProcess
    first: EngineProcess
    second: EngineProcess
    """Has an empty host cache: it can load only KV that `first` has stored."""
    small: EngineProcess
    """Has so few blocks that requests are preempted."""
    root: Path
    subscriber: Subscriber
    """Of `first`."""

    def objects(self) -> set[Path]:
        return stored_kv(self.root, "t0of1")

    def plain_tokens(self, content: list[dict[str, Any]], **fields: Any) -> list[int]:
        return ask(self.plain, self.plain.model, content, **fields).tokens


@pytest.fixture(scope="module")
def fleet(
    engine: StartEngine,
    plain: EngineProcess,
    tmp_path_factory: pytest.TempPathFactory,
    runner: ModelRunner,
) -> Fleet:
    root = tmp_path_factory.mktemp("fleet")

    def sharing(name: str, *more: str) -> EngineProcess:
        # A host cache of its own, so its hits come from the store.
        limits = {"host_cache_dir": f"{root}/{name}-host", "chunk_tokens": CHUNK}
        kv = kv_argument("both", f"file://{root}/store", **limits)
        return engine(name, f"--block-size={BLOCK}", kv, *more, runner=runner)

    subscriber = Subscriber(tmp_path_factory.mktemp("events"))
    fleet = Fleet(
        plain,
        sharing("first", subscriber.argument),
        sharing("second"),
        sharing("small", "--num-gpu-blocks-override=14", "--max-model-len=384"),
        root,
        subscriber,
    )
    for each in fleet[:4]:
        each.wait_ready()
    return fleet


def check(
    fleet: Fleet, engine: EngineProcess, content: list[dict[str, Any]], **fields: Any
) -> Answer:
    answer = ask(engine, engine.model, content, **fields)
    assert answer.tokens == fleet.plain_tokens(content)
    fleet.objects()  # all of them stored, so that other engines can load them
    return answer


@pytest.mark.parametrize(
    "content", [[text(STORY)], [text(STORY[: 6 * BLOCK])], [text("the sea")], PICTURES]
)
def test_second_engine_computes_one_token(fleet: Fleet, content: list[dict[str, Any]]) -> None:
    cold = check(fleet, fleet.first, content, **FOR_DECODE)
    assert cold.body["kv_transfer_params"] == {
        "kvshare": {"num_tokens": cold.num_prompt_tokens - 1, "size": 1}
    }
    warm = check(fleet, fleet.second, content)
    assert warm.num_cached_tokens == warm.num_prompt_tokens - 1


def test_prompts_share_the_kv_of_a_common_prefix(fleet: Fleet) -> None:
    check(fleet, fleet.first, [text(f"alpha {STORY} one")])
    warm = check(fleet, fleet.second, [text(f"alpha {STORY} two and three")])
    # They differ in the last block or the one before; a partial chunk then has another name.
    shared = warm.num_prompt_tokens - 2 * BLOCK
    assert shared - CHUNK < warm.num_cached_tokens < warm.num_prompt_tokens - 1


@pytest.mark.parametrize("num_tokens", [CHUNK - 1, 2 * CHUNK, 4 * CHUNK + 70])
def test_conversation_continues_on_the_other_engine(fleet: Fleet, num_tokens: int) -> None:
    """Each turn loads the prompt and the answer of the last one, at any position of its end."""
    talk = [20 + number * num_tokens % 400 for number in range(num_tokens)]
    stored = 0
    for turn in range(4):
        engine = (fleet.first, fleet.second)[turn % 2]
        answer = complete(engine, engine.model, talk, max_tokens=40)
        assert answer.tokens == complete(fleet.plain, fleet.plain.model, talk, 40).tokens
        assert answer.num_cached_tokens >= stored
        fleet.objects()
        talk += answer.tokens
        # The last token of an answer is sampled, not computed.
        stored = (len(talk) - 1) // BLOCK * BLOCK
        talk += [20 + turn] * 5


def test_prompts_with_other_pictures_share_no_kv(fleet: Fleet) -> None:
    check(fleet, fleet.first, PICTURES)
    warm = check(fleet, fleet.second, [PICTURES[1], PICTURES[0], PICTURES[2]])
    assert warm.num_cached_tokens < BLOCK


def test_other_cache_salt_shares_no_kv(fleet: Fleet) -> None:
    content = [text(f"salted {STORY}")]
    ask(fleet.first, fleet.first.model, content, cache_salt="a")
    fleet.objects()
    other = ask(fleet.second, fleet.second.model, content, cache_salt="b")
    assert other.num_cached_tokens == 0
    same = ask(fleet.second, fleet.second.model, content, cache_salt="a")
    assert same.num_cached_tokens == same.num_prompt_tokens - 1


@pytest.mark.parametrize("loses", ["some", "all"])
def test_lost_objects_are_recomputed(fleet: Fleet, loses: str) -> None:
    content = [text(f"lost {loses} {STORY}")]
    known = fleet.objects()
    check(fleet, fleet.first, content)
    new = sorted(fleet.objects() - known)
    assert len(new) > 3
    for path in new[1::2] if loses == "some" else new:
        path.unlink()
    answer = check(fleet, fleet.second, content)
    assert answer.num_cached_tokens < answer.num_prompt_tokens - 1
    assert fleet.objects() >= set(new), "and saved again"


def test_damaged_objects_are_recomputed(fleet: Fleet) -> None:
    """The look-up finds the objects; their damage shows only during the load."""
    content = [text(f"spoiled {STORY}")]
    known = fleet.objects()
    check(fleet, fleet.first, content)
    new = sorted(fleet.objects() - known)
    shutil.copyfile(new[1], new[0])
    body = bytearray(new[2].read_bytes())
    body[-1] ^= 1
    new[2].write_bytes(body)
    before = counts(fleet.second).get("kvshare_blocks/failed", 0)
    check(fleet, fleet.second, content)
    assert counts(fleet.second)["kvshare_blocks/failed"] > before
    check(fleet, fleet.second, content)  # objects found damaged late are saved with this request
    again = check(fleet, fleet.second, content)
    assert again.num_cached_tokens == again.num_prompt_tokens - 1


def test_hostile_transfer_params_change_nothing(fleet: Fleet) -> None:
    content = [text(f"hostile {STORY}")]
    expected = fleet.plain_tokens(content)
    for params in ({"kvshare": {"num_tokens": -1}}, {"kvshare": "../../x"}, {"kvshare": [1]}):
        answer = ask(fleet.second, fleet.second.model, content, kv_transfer_params=params)
        assert answer.tokens == expected


def test_preempted_requests_resume_with_the_same_tokens(fleet: Fleet) -> None:
    contents = [[text(f"{number} {STORY[:200]}")] for number in range(6)]
    expected = [fleet.plain_tokens(content, max_tokens=100) for content in contents]
    with ThreadPoolExecutor(len(contents)) as clients:
        answers = clients.map(
            lambda content: ask(fleet.small, fleet.small.model, content, max_tokens=100), contents
        )
        assert [answer.tokens for answer in answers] == expected
    assert preemptions(fleet.small) > 0


def preemptions(engine: EngineProcess) -> float:
    return counters(engine.base_url)["vllm:num_preemptions_total", ""]


def test_kv_saved_after_a_client_disconnect_gives_the_plain_tokens(fleet: Fleet) -> None:
    prompt = [20 + number * 3 % 400 for number in range(2 * CHUNK + 7)]
    known = fleet.objects()
    body = {"model": fleet.first.model, "prompt": prompt, "max_tokens": 1000, "ignore_eos": True}
    leaving = begin(fleet.first, "completions", body | {"stream": True})
    assert leaving.getresponse().readline()  # a token: the prompt is computed
    leaving.close()
    wait_for_requests(fleet.first, 0)
    wait_until(lambda: len(fleet.objects() - known) >= 2)
    answer = complete(fleet.second, fleet.second.model, prompt)
    assert answer.tokens == complete(fleet.plain, fleet.plain.model, prompt).tokens
    assert answer.num_cached_tokens >= 2 * CHUNK


def test_kv_event_subscribers_get_stored_blocks(fleet: Fleet) -> None:
    check(fleet, fleet.first, [text(f"events {STORY}")])
    check(fleet, fleet.first, PICTURES)
    before = fleet.subscriber.wait(lambda now: len(now.stored) > 0)
    assert before.stored <= before.computed, "under vLLM's own names"
    objects = fleet.objects()
    check(fleet, fleet.first, [text(f"and more events {STORY}")])
    check(fleet, fleet.first, [text("to tell of it")])
    assert len(fleet.objects()) > len(objects)
    after = fleet.subscriber.wait(lambda now: len(now.stored) > len(before.stored))
    assert after.stored <= after.computed


def test_restarted_engine_loads_its_own_kv(fleet: Fleet) -> None:
    content = [text(f"restart {STORY}")]
    check(fleet, fleet.second, content)
    fleet.second.stop()
    shutil.rmtree(fleet.root / "second-host")
    fleet.second.start()
    fleet.second.wait_ready()
    warm = check(fleet, fleet.second, content)
    assert warm.num_cached_tokens == warm.num_prompt_tokens - 1
