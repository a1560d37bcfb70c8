# SPDX-License-Identifier: Apache-2.0
"""Requests of every kind, good and bad, for `test_like_plain`. The same ones each time."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from lab.servers import openai_client as client

JSON = ("Content-Type", "application/json")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


@dataclass(frozen=True)
class Case:
    """One request, and the name by which differences are listed."""

    name: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = (JSON,)
    method: str = "POST"


def said(words: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": words}]


def bases(model: str) -> dict[str, tuple[str, dict[str, Any]]]:
    greedy = {"model": model, "temperature": 0}
    return {
        "chat": (CHAT, {**greedy, "messages": said("hello there"), "max_tokens": 3}),
        "completion": (COMPLETIONS, {**greedy, "prompt": "once upon", "max_tokens": 3}),
        "response": (RESPONSES, {**greedy, "input": "hello there", "max_output_tokens": 3}),
        "message": (MESSAGES, {**greedy, "messages": said("hello there"), "max_tokens": 3}),
        "count": (f"{MESSAGES}/count_tokens", {"model": model, "messages": said("hello")}),
        "tokenize": ("/tokenize", {"model": model, "prompt": "hello"}),
        "tokenize chat": ("/tokenize", {"model": model, "messages": said("hello")}),
        "detokenize": ("/detokenize", {"model": model, "tokens": [5, 6, 7]}),
        "embedding": ("/v1/embeddings", {"model": model, "input": "hello"}),
    }


WRONG: list[Any] = [None, 0, -1, 2.5, True, "", "x", [], [1], {}, {"a": 1}]
MORE: dict[str, list[Any]] = {
    "stream": [True, "x"],
    "n": [2, 0],
    "logprobs": [True, 1, "x"],
    "top_logprobs": [2],
    "prompt_logprobs": [1],
    "echo": [True],
    "stop": ["a", ["a", "b"], 5],
    "seed": [1, "x"],
    "top_p": [0.5, 2],
    "top_k": [5, -7],
    "temperature": [3, -1, "x"],
    "max_tokens": [1, 100_000],
    "max_completion_tokens": [2],
    "min_tokens": [2, 9],
    "presence_penalty": [0.5, 5],
    "repetition_penalty": [1.1, 0],
    "logit_bias": [{"5": 1}, {"x": 1}],
    "user": ["me"],
    "ignore_eos": [True],
    "return_token_ids": [True],
    "cache_salt": ["s", ""],
    "priority": [1],
    "request_id": ["mine"],
    "unheard_of": [{"a": [1]}],
    "add_special_tokens": [False],
    "skip_special_tokens": [False],
    "chat_template_kwargs": [{"a": 1}],
    "mm_processor_kwargs": [{"a": 1}],
    "vllm_xargs": [{"a": 1}, {"kv_transfer_params": "x"}, "x"],
    "kv_transfer_params": [{"kvshare_save": True}, {"kvshare_save": False}, {"a": 1}, "x"],
    "ec_transfer_params": [{"ecshare_save": False}, {"a": 1}],
    "previous_response_id": ["resp_1"],
    "background": [True],
    "store": [False],
    "instructions": ["be short"],
    "system": ["be short", [{"type": "text", "text": "be short"}]],
    "metadata": [{"user_id": "u"}],
    "thinking": [{"type": "disabled"}],
    "stop_sequences": [["a"]],
    "tool_choice": ["none", "x"],
    "tools": [[], "x"],
    "suffix": ["x"],
    "session_id": ["s"],
}
"""Further fields. Many are unknown to some of the paths, which is a case too."""


def generated(model: str) -> Iterator[Case]:
    for name, (path, base) in bases(model).items():
        yield Case(name, path, encoded(base))
        for field in base:
            rest = {key: base[key] for key in base if key != field}
            yield Case(f"{name} without {field}", path, encoded(rest))
            for value in WRONG:
                yield Case(
                    f"{name} {field}={json.dumps(value)}", path, encoded(base | {field: value})
                )
        if path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
            for field, values in MORE.items():
                for value in values:
                    if field not in base or value not in WRONG:
                        body = encoded(base | {field: value})
                        yield Case(f"{name} {field}={json.dumps(value)}", path, body)
            for options in ({"include_usage": True}, {"continuous_usage_stats": True}, 5):
                body = encoded(base | {"stream": True, "stream_options": options})
                yield Case(f"{name} stream_options={json.dumps(options)}", path, body)


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


def odd_bodies(model: str) -> Iterator[Case]:
    for name, (path, base) in bases(model).items():
        text = encoded(base)
        for kind, body in {
            "empty": b"", "cut": text[:-1], "list": b"[]", "null": b"null", "text": b'"x"',
            "object": b"{}", "bom": b"\xef\xbb\xbf" + text,
            "utf-16": text.decode().encode("utf-16"),
            "utf-32": text.decode().encode("utf-32"), "not utf-8": text[:-1] + b',"a":"\xff"}',
            "nan": text[:-1] + b',"a":NaN}', "infinite": text[:-1] + b',"a":1e999}',
            "large number": text[:-1] + b',"a":' + b"9" * 400 + b"}",
            "lone surrogate": text[:-1] + b',"a":"\\ud800"}', "tail": text + b" x",
            "nul": text + b"\0", "twice": text[:-1] + b',"model":"other"}',
            "deep": text[:-1] + b',"a":' + b"[" * 200 + b"]" * 200 + b"}",
        }.items():  # fmt: skip
            yield Case(f"{name} body {kind}", path, body)


def odd_http(model: str) -> Iterator[Case]:
    for name, (path, base) in bases(model).items():
        case = Case(name, path, encoded(base))
        for given in (
            "application/json; charset=utf-8", "APPLICATION/JSON", "text/plain",
            "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
            "application/vnd.api+json", "",
        ):  # fmt: skip
            yield replace(case, name=f"{name} type {given}", headers=(("Content-Type", given),))
        yield replace(case, name=f"{name} type none", headers=())
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
            yield replace(case, name=f"{name} by {method}", method=method, body=b"", headers=())
        yield replace(case, name=f"{name} slash", path=path + "/")
        yield replace(case, name=f"{name} query", path=path + "?a=b&c=%20")
        for kind, more in {
            "credential": [("Authorization", "Bearer k")],
            "two credentials": [("Authorization", "Bearer a"), ("Authorization", "Bearer b")],
            "session": [("X-Session-ID", "s")], "priority": [("X-Vllm-Priority", "5")],
            "odd priority": [("X-Vllm-Priority", "x")], "rank": [("X-data-parallel-rank", "0")],
            "load as JSON": [("endpoint-load-metrics-format", "JSON")],
            "load as TEXT": [("endpoint-load-metrics-format", "TEXT")],
            "load as XML": [("endpoint-load-metrics-format", "XML")],
            "trace": [("traceparent", f"00-{'1' * 32}-{'2' * 16}-01"), ("baggage", "k=v")],
            "request id": [("X-Request-Id", "mine")], "odd request id": [("X-Request-Id", "a b")],
            "long cookie": [("Cookie", "a" * 40_000)],
            "long key": [("Authorization", "a" * 12_000)],
            "200 headers": [(f"X-{number}", "a") for number in range(200)],
            "origin": [("Origin", "http://evil.example")], "packed": [("Content-Encoding", "gzip")],
            "accepts packed": [("Accept-Encoding", "gzip")],
            "accepts html": [("Accept", "text/html")],
        }.items():  # fmt: skip
            yield replace(case, name=f"{name} header {kind}", headers=(JSON, *more))
        asked = (("Origin", "http://a.example"), ("Access-Control-Request-Method", "POST"))
        yield replace(case, name=f"{name} preflight", method="OPTIONS", headers=asked, body=b"")
    for path in ("/v1/models", "/health", "/nothing", "/", "/v1", "/v1/models/x"):
        for method in ("GET", "HEAD", "POST"):
            yield Case(f"{path} by {method}", path, headers=(), method=method)
    for path in ("/v1/models/", "/v1/models?a=b", "/version", "/ping", "/load", "/metrics"):
        yield Case(f"{path} by GET", path, headers=(), method="GET")


def parts(model: str) -> Iterator[Case]:
    url = client.picture(1, 56)
    text = {"type": "text", "text": "what is this?"}
    given: dict[str, Any] = {
        "picture": {"type": "image_url", "image_url": {"url": url}},
        "picture with detail": {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        "picture as text": {"type": "image_url", "image_url": url},
        "picture without type": {"image_url": url},
        "picture without type, object": {"image_url": {"url": url}},
        "input_image": {"type": "input_image", "image_url": url},
        "odd type": {"type": "image_url", "image_url": {"url": url.replace("image/png", "X/Y")}},
        "no type in url": {"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}},
        "no semicolon": {"type": "image_url", "image_url": {"url": "data:base64,AAAA"}},
        "not base64": {"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}},
        "not a picture": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        "empty": {"type": "image_url", "image_url": {"url": ""}},
        "no url": {"type": "image_url", "image_url": {}},
        "null": {"type": "image_url", "image_url": None},
        "null without type": {"image_url": None},
        "null beside text": {"type": "text", "text": "a", "image_url": None},
        "null pil": {"image_pil": None},
        "file": {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        "ftp": {"type": "image_url", "image_url": {"url": "ftp://a.example/x"}},
        "sound": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        "embeds": {"type": "image_embeds", "image_embeds": {"image_grid_thw": "AAAA"}},
        "uuid": {"type": "image_url", "image_url": {"url": url}, "uuid": "mine"},
        "refusal": {"type": "refusal", "refusal": "no"},
        "unknown": {"type": "unheard_of", "a": 1},
        "number": 5,
        "string": "hello",
    }
    for kind, part in given.items():
        body = {"model": model, "temperature": 0, "max_tokens": 3}
        body["messages"] = [{"role": "user", "content": [text, part]}]
        yield Case(f"part {kind}", CHAT, encoded(body))
    for kind, part in given.items():
        content = [{"type": "input_text", "text": "what is this?"}, part]
        body = {"model": model, "temperature": 0, "max_output_tokens": 3}
        body["input"] = [{"role": "user", "content": content}]
        yield Case(f"response part {kind}", RESPONSES, encoded(body))
    for media_type in ("image/png", "IMAGE/PNG", "application/octet-stream", "", None, "a,b", 5):
        data = url.partition(",")[2]
        source = {"type": "base64", "media_type": media_type, "data": data}
        content = [text, {"type": "image", "source": source}]
        body = {"model": model, "temperature": 0, "max_tokens": 3}
        body["messages"] = [{"role": "user", "content": content}]
        yield Case(f"message picture {media_type}", MESSAGES, encoded(body))
    for role in ("system", "assistant", "tool", "developer", "x", "", None, 5):
        messages = [{"role": role, "content": "hello"}, *said("and now?")]
        body = {"model": model, "temperature": 0, "max_tokens": 3, "messages": messages}
        yield Case(f"role {role}", CHAT, encoded(body))
        yield Case(f"message role {role}", MESSAGES, encoded(body))


def cases(model: str) -> list[Case]:
    """Return all that are written by hand, and some of those that are generated for each path."""
    chance = random.Random(1)
    made = list(parts(model))
    for make, number in ((generated, 220), (odd_bodies, 50), (odd_http, 100)):
        every = list(make(model))
        written = [each for each in every if make is not generated and is_main(each)]
        rest = [each for each in every if each not in written]
        made += written + chance.sample(rest, number)
    names = [case.name for case in made]
    assert len(set(names)) == len(names), sorted({n for n in names if names.count(n) > 1})
    return made


def is_main(case: Case) -> bool:
    return case.name.startswith(("chat ", "/"))
