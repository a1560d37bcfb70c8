# SPDX-License-Identifier: Apache-2.0
"""The same requests to a plain engine and through the router over E, P and D.

Every difference that a client can see is listed here with its reason. One that is not listed fails,
and so does one that is listed and is no more.
"""

import http.client
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab.servers.engines import EngineProcess, ec_argument, kv_argument
from lab.servers.processes import LOOPBACK, Server
from lab.servers.router import RouterProcess
from tests.conftest import LOGS, StartEngine
from tests.engines.chat import stored_kv
from tests.engines.like_plain_cases import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Case,
    bases,
    cases,
    said,
)
from tests.releases import VLLM

pytestmark = [pytest.mark.engine, pytest.mark.models]

BLOCK = 32
TIMEOUT_S = 120.0

# Fields in both answers that vary from call to call, or count cached tokens; see below.
VARIES = {
    "id", "created", "created_at", "completed_at", "item_id", "system_fingerprint",
    "sequence_number",
    "cached_tokens", "created_cache_tokens", "input_tokens", "cache_read_input_tokens",
    "cache_creation_input_tokens", "token_ids", "request_id", "metrics",
}  # fmt: skip
HEADERS = {
    "date": "the time",
    "server": "the router's own name",
    "content-length": "compared as the body",
    "transfer-encoding": "the router sends no length ahead of streams, and uvicorn of neither",
    "connection": "how the connection goes on",
    "vary": "vLLM says Origin where no origin is allowed; no cache keeps such answers",
    "x-request-id": "the router names each request; a plain vLLM only if it is told to",
    "x-ecshare-path": "the stages that worked",
    "x-ecshare-avoided": "the stages that had nothing to do",
    "server-timing": "what the stages took",
    "cache-control": "no proxy may hold events back",
    "x-accel-buffering": "the same, for nginx",
}
"""Headers that are not compared, and why."""


class Difference(NamedTuple):
    """What differs in the cases whose names match, and why that is so."""

    names: str
    aspects: set[str]
    why: str


METHODS = "GET|PUT|DELETE|PATCH|OPTIONS|POST"
DIFFERENCES = [
    Difference(
        rf".* by ({METHODS})|.* body not utf-8",
        {"body"},
        "FastAPI's own errors hold a `detail` alone. The router's have the path's own shape.",
    ),
    Difference(
        "(message|count) .*",
        {"body"},
        "vLLM's checks of a request answer in OpenAI's shape here too, the router in Anthropic's.",
    ),
    Difference(
        "embedding .*",
        {"status", "type", "headers", "body"},
        "An engine of a model that makes tokens has no such path. The router has, and checks.",
    ),
    Difference(
        ".* body (nan|infinite|lone surrogate)",
        {"status", "body"},
        "That is no JSON (RFC 8259), though Python's parser takes it.",
    ),
    Difference(
        r'.* (kv|ec)_transfer_params=\{"a": 1\}|.* vllm_xargs=\{"kv_transfer_params": "x"\}',
        {"status", "body"},
        "Transfer params are the fleet's own.",
    ),
    Difference(
        "response previous_response_id=.*", {"status"}, "Responses are not kept, and never found."
    ),
    Difference('count model=""', {"status", "body"}, "An empty model is no model, at every path."),
    Difference(
        ".* header two credentials",
        {"status", "body"},
        "A gateway before the router may have checked another one than vLLM does.",
    ),
    Difference(
        ".* header packed",
        {"status", "body"},
        "vLLM does not read the header, and takes a packed body for malformed JSON.",
    ),
    Difference(
        ".* preflight",
        {"type", "headers", "body"},
        "Refused in both, by the router as JSON and without the list of methods.",
    ),
    Difference("/(health|v1/models) by HEAD", {"status", "headers"}, "Health checks may use HEAD."),
    Difference("/health by GET", {"type", "body"}, "It tells of all engines, and not of one."),
    Difference(
        "/(version|ping|load) by GET",
        {"status", "type", "body"},
        "They tell of one engine. The router has pages of its own.",
    ),
    Difference("/metrics by GET", {"type"}, "Another version of the Prometheus client."),
    Difference(
        "part (picture as text|input_image)",
        {"status", "body"},
        "The router takes a url without an object around it, and an image without detail.",
    ),
    Difference(
        "part (no semicolon|file)|message picture a,b",
        {"status"},
        "A url that is at fault is the client's error: 400, and not 500 or 501.",
    ),
    Difference("message picture 5", {"status", "body"}, "A media type is text."),
]
if VLLM < (0, 32):
    DIFFERENCES += [
        Difference(
            ".* (header origin|preflight)",
            {"status", "headers"},
            "Until 0.31 vLLM lets the pages of any origin ask.",
        )
    ]


class Seen(NamedTuple):
    """The parts of an answer that a client sees and that do not vary from call to call."""

    status: int
    type: str
    headers: tuple[str, ...]
    body: Any


def sent(server: Server, case: Case) -> Seen:
    connection = http.client.HTTPConnection(LOOPBACK, server.port.number, timeout=TIMEOUT_S)
    connection.putrequest(case.method, case.path, skip_accept_encoding=True)
    for header in case.headers:
        connection.putheader(*header)
    if case.body or case.method in ("POST", "PUT", "PATCH"):
        connection.putheader("Content-Length", str(len(case.body)))
    connection.endheaders(case.body)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    names = {name.lower() for name, _ in response.getheaders()} - HEADERS.keys() - {"content-type"}
    kind = response.getheader("Content-Type", "").replace(" ", "")
    return Seen(response.status, kind, tuple(sorted(names)), shown(response.status, kind, body))


def shown(status: int, kind: str, body: bytes) -> Any:
    if kind.startswith("text/event-stream"):
        return stream_shown(body)
    try:
        value = json.loads(body)
    except ValueError:
        return "text" if body else "nothing"
    return fixed(value) if status == 200 else shape(value)


def stream_shown(body: bytes) -> Any:
    """The kinds of events in order, and their joined text: vLLM may merge tokens into one event."""
    kinds: list[Any] = []
    words = ""
    for event in body.decode().split("\n\n"):
        lines = [line.partition(": ") for line in event.split("\n") if line]
        told = {name: value for name, _, value in lines}
        data = told.get("data", "")
        value = json.loads(data) if data.startswith("{") else data
        words += "".join(texts(value))
        kind = [told.get("event"), shape(value)]
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    return kinds, words


def texts(value: Any) -> Iterator[str]:
    """The text of an event, in the shape of any API."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in ("content", "text", "delta") and isinstance(inner, str):
                yield inner
            else:
                yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)


def fixed(value: Any) -> Any:
    """A value without the parts that vary from call to call."""
    if isinstance(value, dict):
        return {name: fixed(inner) for name, inner in value.items() if name not in VARIES}
    return [fixed(inner) for inner in value] if isinstance(value, list) else value


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value[:1]]
    return "value"


def differences(case: Case, plain: Seen, ours: Seen) -> dict[str, tuple[Any, Any]]:
    pairs = zip(Seen._fields, plain, ours, strict=True)
    return {name: (one, other) for name, one, other in pairs if one != other}


class Fleet(NamedTuple):
    plain: EngineProcess
    e: EngineProcess
    p: EngineProcess
    d: EngineProcess
    store: Path

    def router(self, *options: str) -> RouterProcess:
        engines = {"encoder": [self.e], "prefiller": [self.p], "decoder": [self.d]}
        return RouterProcess("router", LOGS / __name__, engines, options=options)


@pytest.fixture(scope="module")
def fleet(engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    root = tmp_path_factory.mktemp("fleet")
    url = f"file://{root}/store"
    blocks = f"--block-size={BLOCK}", "--num-gpu-blocks-override=256"
    # The long prompt fits, and answers without a limit still end soon.
    shape = (*blocks, "--mm-processor-cache-gb=0", "--max-model-len=2560")

    def consumer(name: str) -> EngineProcess:
        host = f"{root}/{name}-host"
        kv = kv_argument("both", url, host_cache_dir=host)
        return engine(name, *shape, kv, ec_argument("consumer", url, host_cache_dir=host))

    fleet = Fleet(
        engine("plain", *shape),
        engine("encode", ec_argument("producer", url, host_cache_dir=f"{root}/encode-host")),
        consumer("prefill"),
        consumer("decode"),
        root,
    )
    for each in fleet[:4]:
        each.wait_ready()
    return fleet


def test_every_difference_from_a_plain_engine_is_listed(fleet: Fleet) -> None:
    found: dict[str, dict[str, tuple[Any, Any]]] = {}
    all_cases = cases(fleet.plain.model)
    with fleet.router() as router:
        for case in all_cases:
            found[case.name] = differences(case, sent(fleet.plain, case), sent(router, case))
    used: dict[str, set[str]] = defaultdict(set)
    unlisted = {}
    for name, aspects in found.items():
        reasons = [each for each in DIFFERENCES if aspects and re.fullmatch(each.names, name)]
        for each in reasons:
            used[each.names] |= each.aspects & aspects.keys()
        explained = set().union(*(each.aspects for each in reasons))
        if left := {each: aspects[each] for each in aspects if each not in explained}:
            unlisted[name] = left
    assert not unlisted, "\n".join(f"{name}: {aspects}" for name, aspects in unlisted.items())
    gone = [each for each in DIFFERENCES if used[each.names] != each.aspects]
    assert not gone, f"listed, and no more: {gone}"


COLD = " Say something of the sea, the wind, the stars, and of an old stone house."
LONG = 2200 * " picture"
"""Long enough that D gets it while P computes; each word is a token."""


def usage(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The last usage that an answer reports, streamed or not."""
    case = Case("", path, json.dumps(body).encode())
    connection = http.client.HTTPConnection(LOOPBACK, server.port.number, timeout=TIMEOUT_S)
    connection.request("POST", case.path, case.body, dict(case.headers))
    text = connection.getresponse().read().decode()
    connection.close()
    lines = text.split("\n") if body.get("stream") else ["data: " + text]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    told = [event.get("response") or event.get("message") or event for event in events]
    last: dict[str, Any] = [each["usage"] for each in told if each.get("usage")][-1]
    return last


def cached(usage: dict[str, Any]) -> int | None:
    for name in ("prompt_tokens_details", "input_tokens_details"):
        if name in usage:
            return (usage[name] or {}).get("cached_tokens")
    return usage.get("cache_read_input_tokens")


def total(usage: dict[str, Any]) -> int:
    apart = ("cache_read_input_tokens", "cache_creation_input_tokens")
    first = usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"]
    return int(first) + sum(usage.get(name) or 0 for name in apart)


@pytest.mark.parametrize("hand_over", ["streamed", "after"])
@pytest.mark.parametrize("stream", [False, True])
def test_usage_of_a_new_prompt_reports_no_cached_tokens(
    fleet: Fleet, hand_over: str, stream: bool
) -> None:
    told = {}
    with fleet.router(f"--hand-over={hand_over}") as router:
        for name, (path, base) in bases(fleet.plain.model).items():
            if path not in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
                continue
            # Prompts of their own, of less than a block and of several.
            for text in (COLD, 8 * COLD, *((LONG,) if hand_over == "streamed" else ())):
                length = len(text)
                words = f"{hand_over} {stream} {name} {length}." + text
                prompt = words if path in (COMPLETIONS, RESPONSES) else said(words)
                field = {COMPLETIONS: "prompt", RESPONSES: "input"}.get(path, "messages")
                body = base | {field: prompt, "stream": stream}
                if path in (CHAT, COMPLETIONS) and stream:
                    body["stream_options"] = {"include_usage": True}
                for server in (fleet.plain, router):
                    first = usage(server, path, body)
                    stored_kv(fleet.store, "t0of1")
                    again = usage(server, path, body)
                    assert total(first) == total(again)
                    counts = cached(first), cached(again), total(again)
                    told[name, length, server is router] = counts
    for (name, length, is_routed), (cold, warm, tokens) in told.items():
        if is_routed:
            _, warm_at_plain, tokens_at_plain = told[name, length, False]
            assert tokens == tokens_at_plain
            assert not cold, (name, length, cold)
            assert warm is not None
            assert warm >= (warm_at_plain or 0), (name, length)
