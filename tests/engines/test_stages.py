# SPDX-License-Identifier: Apache-2.0
"""One engine encodes, one prefills, one decodes: the tokens equal those of a single engine.

What P and D load of each other and of E may be lost on the way.
"""

import base64
import json
import shutil
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import anthropic
import openai
import pytest

from lab.servers import collector as collectors
from lab.servers.collector import CollectedSpan, Collector
from lab.servers.engines import EngineProcess, ModelRunner, ec_argument, kv_argument
from lab.servers.processes import Server
from lab.servers.router import RouterProcess
from tests.conftest import LOGS, StartEngine
from tests.engines.chat import (
    QUESTION,
    Answer,
    announced,
    ask,
    counting,
    passed_on,
    picture,
    stored_kv,
    text,
    warmed,
)
from tests.engines.runners import V2_IN_THE_GATE, on
from tests.engines.updating import DEV_MODE, begin_epoch, update
from tests.releases import ANNOUNCES_AT_EVERY_ENDPOINT, HAS_ENCODER_METRICS

# Other tests of the gate cover the same on V1.
pytestmark = [pytest.mark.engine, on(pytest.param("v1", marks=pytest.mark.models), V2_IN_THE_GATE)]

BLOCK = 32
LOADED, MISSING = "ecshare_items/loaded", "ecshare_misses/missing"
FAILED, NOT_FOUND = "kvshare_blocks/failed", "kvshare_blocks/missed"
STORY = text("Tell me a story about the sea, the wind and the stars. " * 8)


class Fleet(NamedTuple):
    plain: EngineProcess
    e: EngineProcess
    p: EngineProcess
    d: EngineProcess
    root: Path
    collector: Collector

    def plain_tokens(self, *content: dict[str, Any]) -> list[int]:
        return ask(self.plain, self.plain.model, list(content)).tokens

    def encode(self, *content: dict[str, Any]) -> Answer:
        return ask(self.e, self.e.model, list(content))

    def prefill(self, content: list[dict[str, Any]], **fields: Any) -> Answer:
        """Have P compute a prompt; returns when its KV is stored."""
        answer = ask(self.p, self.p.model, content, max_tokens=1, **fields)
        stored_kv(self.root, "t0of1")
        return answer


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with pytest.MonkeyPatch.context() as environment, Collector.listening() as collector:
        for name, value in collectors.ENVIRONMENT.items():
            environment.setenv(name, value)
        yield collector


@pytest.fixture(scope="module")
def fleet(
    engine: StartEngine,
    plain: EngineProcess,
    tmp_path_factory: pytest.TempPathFactory,
    runner: ModelRunner,
    collector: Collector,
) -> Fleet:
    root = tmp_path_factory.mktemp("fleet")
    store = f"file://{root}/store"
    traced = f"--otlp-traces-endpoint={collector.endpoint}"

    def stage(name: str) -> EngineProcess:
        # A host cache of its own, so its hits come from the store.
        options = {"host_cache_dir": f"{root}/{name}-host", "wait_s": 10}
        ec = ec_argument("consumer", store, **options)
        kv = kv_argument("both", store, chunk_tokens=2 * BLOCK, **options)
        arguments = (f"--block-size={BLOCK}", "--enable-mm-embeds", "--mm-processor-cache-gb=0")
        return engine(name, *arguments, ec, kv, traced, environment=DEV_MODE, runner=runner)

    ec = ec_argument("producer", store, host_cache_dir=f"{root}/e-host")
    e = engine("e", ec, traced, environment=DEV_MODE)
    fleet = Fleet(plain, e, stage("p"), stage("d"), root, collector)
    for each in fleet[:4]:
        each.wait_ready()
    return fleet


def test_v2_engines_schedule_asynchronously(fleet: Fleet, runner: ModelRunner) -> None:
    for each in (fleet.p, fleet.d):
        asked = f"{each.base_url}/server_info?config_format=json"
        with urllib.request.urlopen(asked, timeout=30) as reply:
            config = json.load(reply)["vllm_config"]["scheduler_config"]
        assert config["async_scheduling"] == (runner == "v2")


def test_decoder_without_pixels_computes_one_token(fleet: Fleet) -> None:
    shown = [STORY, picture(1, "one"), picture(2, "two"), QUESTION]
    encoded = fleet.encode(*shown[1:3])
    content = [STORY, announced(encoded, "one"), announced(encoded, "two"), QUESTION]
    with counting(fleet.p) as gained:
        cold = fleet.prefill(content, **passed_on(encoded))
    if HAS_ENCODER_METRICS:
        assert gained[LOADED] == 2
    assert cold.num_cached_tokens == 0
    warm = ask(fleet.d, fleet.d.model, content, **passed_on(encoded))
    assert warm.tokens == fleet.plain_tokens(*shown)
    assert warm.num_cached_tokens == warm.num_prompt_tokens - 1
    other = fleet.plain_tokens(STORY, shown[2], shown[1], QUESTION)
    assert other != warm.tokens, "the tokens do not depend on the pictures: no test"


def test_lost_embedding_fails_only_its_request(fleet: Fleet) -> None:
    lost = announced(fleet.encode(picture(3, "three")), "three") | {"uuid": "lost"}
    for each in (fleet.p, fleet.d):
        failed = ask(each, each.model, [lost, QUESTION])
        assert failed.status == 500
        assert "error" in failed.body
        in_full = [picture(4), QUESTION]
        assert ask(each, each.model, in_full).tokens == fleet.plain_tokens(*in_full)


def test_embedding_that_a_cleaner_removed_is_not_waited_for(fleet: Fleet) -> None:
    """The router remembers it, and says so. P would wait 10 s for one that E has just announced."""
    removed = announced(fleet.encode(picture(3, "three")), "three") | {"uuid": "removed"}
    said = {"ec_transfer_params": {"ecshare": {"names_all": True}}}
    with counting(fleet.p) as gained:
        failed = ask(fleet.p, fleet.p.model, [removed, QUESTION], **said)
    assert failed.status == 500
    if HAS_ENCODER_METRICS:
        assert gained[MISSING] == 1
    in_full = [picture(4), QUESTION]
    assert ask(fleet.p, fleet.p.model, in_full, **said).tokens == fleet.plain_tokens(*in_full)


@pytest.mark.parametrize("loses", ["some", "all"])
def test_lost_kv_is_recomputed_from_the_embedding(fleet: Fleet, loses: str) -> None:
    seed, uuid = (5, 6)[loses == "all"], f"loses {loses}"
    shown = [text(f"{loses} is lost"), picture(seed, uuid), STORY, QUESTION]
    encoded = fleet.encode(shown[1])
    content = [shown[0], announced(encoded, uuid), *shown[2:]]
    known = stored_kv(fleet.root, "t0of1")
    fleet.prefill(content, **passed_on(encoded))
    new = sorted(stored_kv(fleet.root, "t0of1") - known)
    assert len(new) > 3
    for path in new[1::2] if loses == "some" else new:
        path.unlink()
    with counting(fleet.d) as gained:
        answer = ask(fleet.d, fleet.d.model, content, **passed_on(encoded))
    assert answer.tokens == fleet.plain_tokens(*shown)
    assert answer.num_cached_tokens < answer.num_prompt_tokens - 1
    if HAS_ENCODER_METRICS and loses == "all":
        assert gained[LOADED] == 1


def test_damaged_kv_is_recomputed_from_the_embedding(fleet: Fleet) -> None:
    """The look-up of D succeeds; the damage shows when the request has its blocks."""
    shown = [text("what is spoiled"), picture(7, "seven"), STORY, QUESTION]
    encoded = fleet.encode(shown[1])
    content = [shown[0], announced(encoded, "seven"), *shown[2:]]
    known = stored_kv(fleet.root, "t0of1")
    fleet.prefill(content, **passed_on(encoded))
    new = sorted(stored_kv(fleet.root, "t0of1") - known)
    for path in new:
        shutil.copyfile(sorted(known)[0], path)
    with counting(fleet.d) as gained:
        answer = ask(fleet.d, fleet.d.model, content, **passed_on(encoded))
    assert answer.tokens == fleet.plain_tokens(*shown)
    assert gained[FAILED] > 0
    if HAS_ENCODER_METRICS:
        assert gained[LOADED] == 1


# --- requests of other coordinators and clients ---


@pytest.mark.parametrize("returned", [False, True])
def test_llm_d_coordinator_works_without_a_router(fleet: Fleet, returned: bool) -> None:
    """examples/coordinator describes the same requests."""
    shown = [text(f"returned: {returned}"), picture(8 + returned), STORY, QUESTION]
    fleet.encode(shown[1])  # the coordinator passes on nothing of the answer
    for_p = {"do_remote_decode": True, "do_remote_prefill": False}
    prefilled = ask(fleet.p, fleet.p.model, shown, max_tokens=1, kv_transfer_params=for_p)
    params = prefilled.body["kv_transfer_params"] if returned else {}
    params |= {"do_remote_decode": False, "do_remote_prefill": True}
    answer = ask(fleet.d, fleet.d.model, shown, kv_transfer_params=params)
    assert answer.tokens == fleet.plain_tokens(*shown)
    assert answer.num_cached_tokens == answer.num_prompt_tokens - 1


@pytest.fixture(scope="module")
def router(fleet: Fleet) -> Iterator[RouterProcess]:
    engines = {"encoder": [fleet.e], "prefiller": [fleet.p], "decoder": [fleet.d]}
    # Beside P, D may answer first: P's request is cancelled then.
    options = ["--hand-over=after", f"--otlp-traces-endpoint={fleet.collector.endpoint}"]
    with RouterProcess("router", LOGS / __name__, engines, options) as router:
        router.wait_ready()
        yield router


Said = tuple[Any, str]
"""An answer, and the engines that it passed through."""


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def said(answer: Any, reply: Any) -> Said:
    return answer, reply.headers.get("x-ecshare-path", "")


def complete(server: Server, model: str, number: int) -> Said:
    with client_of(server) as client:
        reply = client.completions.with_raw_response.create(
            model=model,
            prompt=f"{number}: {STORY['text']}",
            max_tokens=12,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
    choice: Any = reply.parse().choices[0]
    return said(choice.token_ids, reply)


def chat(server: Server, model: str, number: int) -> Said:
    content: Any = [STORY, picture(20 + number), QUESTION]
    with client_of(server) as client:
        reply = client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": content}],
            max_tokens=12,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
    choice: Any = reply.parse().choices[0]
    return said(choice.token_ids, reply)


def respond(server: Server, model: str, number: int) -> Said:
    url = picture(30 + number)["image_url"]["url"]
    content: Any = [
        {"type": "input_text", "text": STORY["text"]},
        {"type": "input_image", "image_url": url, "detail": "auto"},
    ]
    with client_of(server) as client:
        reply = client.responses.with_raw_response.create(
            model=model,
            input=[{"role": "user", "content": content}],
            max_output_tokens=12,
            temperature=0,
        )
    return said(reply.parse().output_text, reply)


def message(server: Server, model: str, number: int) -> Said:
    data = picture(40 + number)["image_url"]["url"].split(",")[1]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content: Any = [STORY, {"type": "image", "source": source}]
    with anthropic.Anthropic(base_url=server.base_url, auth_token="none", max_retries=0) as client:
        reply = client.messages.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": content}],
            max_tokens=12,
            extra_body={"temperature": 0},
        )
    (block,) = reply.parse().content
    return said(block.to_dict(), reply)


@pytest.mark.parametrize("ask_at", [complete, chat, respond, message])
def test_every_endpoint_gives_the_plain_answer(
    fleet: Fleet, router: RouterProcess, ask_at: Any
) -> None:
    model = fleet.plain.model
    with counting(fleet.p) as gained:
        answer, path = ask_at(router, model, 1)
    has_picture = ask_at is not complete
    assert path == ("encode,prefill,decode" if has_picture else "prefill,decode")
    if HAS_ENCODER_METRICS and (ask_at is chat or ANNOUNCES_AT_EVERY_ENDPOINT):
        assert gained[LOADED] == has_picture
    expected, _ = ask_at(fleet.plain, model, 1)
    assert answer
    assert answer == expected
    other, _ = ask_at(fleet.plain, model, 2)
    assert answer != other, "the answer does not depend on the prompt: no test"


def test_p_looks_for_no_kv_behind_a_new_picture(fleet: Fleet, router: RouterProcess) -> None:
    """E says that the store did not have it, and the router tells P."""

    def num_not_found(*content: Any) -> int:
        with counting(fleet.p) as gained, client_of(router) as client:
            answer = client.chat.completions.create(
                model=fleet.plain.model,
                messages=[{"role": "user", "content": list(content)}],
                max_tokens=12,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
        choice: Any = answer.choices[0]
        assert choice.token_ids == fleet.plain_tokens(*content)
        return gained[NOT_FOUND]

    shown = picture(70)
    assert num_not_found(shown, STORY, QUESTION) <= 2, "blocks before the picture"
    assert num_not_found(shown, text("and now"), STORY, QUESTION) > 2


def test_warmed_prompts_are_not_computed(fleet: Fleet, tmp_path: Path) -> None:
    content = [text("what was prefilled ahead"), STORY, QUESTION]
    corpus = tmp_path / "prompts.jsonl"
    corpus.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
    p = f"--prefiller={fleet.p.base_url}"
    assert warmed(corpus, "--kv", p) == {"new": 1}
    stored_kv(fleet.root, "t0of1")
    assert warmed(corpus, "--kv", p) == {"there already": 1}
    answer = ask(fleet.d, fleet.d.model, content)
    assert answer.tokens == fleet.plain_tokens(*content)
    assert answer.num_cached_tokens == answer.num_prompt_tokens - 1


def test_router_does_not_encode_a_warmed_picture(
    fleet: Fleet, router: RouterProcess, tmp_path: Path
) -> None:
    """With the name that the encode engine got, though the router has not seen it before."""
    shown = picture(60)
    content: Any = [STORY, shown, QUESTION]
    png = base64.b64decode(shown["image_url"]["url"].partition(",")[2])
    (tmp_path / "60.png").write_bytes(png)
    assert warmed(tmp_path, f"--encoder={fleet.e.base_url}") == {"new": 1}
    with counting(fleet.e) as on_e, counting(fleet.p) as on_p:
        answer = client_of(router).chat.completions.create(
            model=fleet.plain.model,
            messages=[{"role": "user", "content": content}],
            max_tokens=2,
        )
    assert answer.choices
    if HAS_ENCODER_METRICS:
        assert on_e["ecshare_items/encoded"] == on_p["ecshare_items/encoded"] == 0
        assert on_p[LOADED] == 1
    other = tmp_path / "other"
    other.mkdir()
    other_png = picture(61)["image_url"]["url"].partition(",")[2]
    (other / "61.png").write_bytes(base64.b64decode(other_png))
    server = f"--server={router.base_url}"
    assert warmed(other, server) == {"new": 1}
    assert warmed(other, server) == {"there already": 1}


def test_one_trace_has_spans_of_router_engines_and_connectors(
    fleet: Fleet, router: RouterProcess
) -> None:
    trace_id = uuid4().hex  # the collector has the spans of both runners
    content: Any = [text("what is traced"), picture(50), STORY, QUESTION]
    with client_of(router) as client:
        client.chat.completions.create(
            model=fleet.plain.model,
            messages=[{"role": "user", "content": content}],
            max_tokens=2,
            extra_headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"},
        )

    def under(span: CollectedSpan) -> list[CollectedSpan]:
        return [each for each in got if each.parent_id == span.span_id]

    def of(stage: str) -> dict[str, CollectedSpan]:
        """The spans of an engine and its connectors in the call of a stage."""
        (call,) = [each for each in under(whole) if each.name == f"ecshare.{stage}"]
        return {each.name: each for each in under(call)}

    # Each process exports its spans at its own time.
    got = fleet.collector.trace(
        trace_id, lambda spans: Counter(each.name for each in spans) >= SPANS_OF_A_TRACE
    )
    (whole,) = [each for each in got if each.name == "POST /v1/chat/completions"]
    e, p, d = of("encode"), of("prefill"), of("decode")
    assert e["ecshare.item"].attributes["ecshare.item.found"] == "absent"
    assert p["ecshare.item"].attributes["ecshare.item.found"] == "ready"
    assert p["kvshare.look_up"].attributes["kvshare.look_up.tokens"] == 0
    assert "kvshare.load" not in p
    num_tokens = p["llm_request"].attributes["gen_ai.usage.prompt_tokens"]
    assert d["kvshare.look_up"].attributes["kvshare.look_up.tokens"] == num_tokens - 1
    assert d["kvshare.load"].attributes["kvshare.load.tokens"] == num_tokens - 1
    assert 0 < d["kvshare.load"].seconds < d["llm_request"].seconds


SPANS_OF_A_TRACE = Counter(
    {
        "POST /v1/chat/completions": 1,
        **{f"ecshare.{stage}": 1 for stage in ("encode", "prefill", "decode")},
        "llm_request": 3,
        "ecshare.item": 2,
        "kvshare.look_up": 2,
        "kvshare.load": 1,
    }
)

# The program `vllm bench serve`; vLLM's command line lacks the metadata of the CPU build.
BENCHMARK = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.mark.models  # vLLM's benchmark takes its time to start
def test_vllms_benchmark_runs_without_a_failed_request(
    fleet: Fleet, router: RouterProcess, tmp_path: Path
) -> None:
    number = 12
    for backend, endpoint in (
        ("openai", "/v1/completions"),
        ("openai-chat", "/v1/chat/completions"),
    ):
        ended = subprocess.run(
            [
                *(sys.executable, "-c", BENCHMARK),
                *(f"--backend={backend}", f"--endpoint={endpoint}", f"--model={fleet.plain.model}"),
                *(f"--base-url={router.base_url}", "--dataset-name=random"),
                *(f"--num-prompts={number}", "--random-input-len=64", "--random-output-len=8"),
                *("--save-result", f"--result-dir={tmp_path}", f"--result-filename={backend}.json"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout
        result = json.loads((tmp_path / f"{backend}.json").read_text())
        assert (result["completed"], result.get("failed", 0)) == (number, 0), ended.stdout


def test_stages_are_updated_in_place_one_after_another(
    fleet: Fleet, engine: StartEngine, other_vlm: Path, runner: ModelRunner
) -> None:
    """The last test: from here on the fleet has other weights."""
    trained = engine("trained", model=other_vlm)
    shown = [text("Now look at this. " * 12), picture(5, "five"), QUESTION]
    old = fleet.plain_tokens(*shown)
    encoded = fleet.encode(shown[1])
    bare = [shown[0], announced(encoded, "five"), shown[2]]
    fleet.prefill(bare, **passed_on(encoded))
    begin_epoch(f"{fleet.root}/store")
    update(fleet.e, other_vlm)
    update(fleet.p, other_vlm)
    encoded = fleet.encode(shown[1])
    assert fleet.prefill(bare, **passed_on(encoded)).num_cached_tokens == 0
    new = ask(trained.wait_ready(), trained.model, shown).tokens
    assert new != old
    behind = ask(fleet.d, fleet.d.model, shown)
    assert (behind.tokens, behind.num_cached_tokens) == (old, 0)
    update(fleet.d, other_vlm)
    warm = ask(fleet.d, fleet.d.model, bare, **passed_on(encoded))
    assert warm.tokens == new
    assert warm.num_cached_tokens == warm.num_prompt_tokens - 1
