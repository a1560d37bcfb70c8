# SPDX-License-Identifier: Apache-2.0
"""The gate before an engine's API server, with the server's own request type."""

import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote_from_bytes

import pytest
from starlette.requests import Request
from starlette.responses import Response

from ecshare.plugin import gate
from ecshare.plugin.gate import RouterGate
from ecshare.store.errors import ConfigError
from ecshare.store.integrity import TOKEN_HEADER, router_token

KEY = "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
TOKEN = router_token(KEY.encode())


class Answered:
    """The outcome of a request: the status, the response, and the body that reached the server."""

    def __init__(self) -> None:
        self.status = 0
        self.text = b""
        self.reached: bytes | None = None


async def ask(
    *chunks: bytes, headers: tuple[tuple[str, str], ...] = (), kind: str = "http"
) -> Answered:
    answered = Answered()

    async def server(scope: Any, receive: Any, send: Any) -> None:
        if kind != "http":
            answered.reached = b""
            return
        answered.reached = await Request(scope, receive).body()
        await Response(b"served")(scope, receive, send)

    async def arriving() -> AsyncIterator[dict[str, Any]]:
        for number, chunk in enumerate(chunks, 1):
            more = number < len(chunks)
            yield {"type": "http.request", "body": chunk, "more_body": more}
        yield {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answered.status = message.get("status", answered.status)
        answered.text += message.get("body", b"")

    scope = {
        "type": kind,
        "method": "POST",
        "headers": [(name.encode(), value.encode()) for name, value in headers],
    }
    await RouterGate(server)(scope, arriving().__anext__, send)
    return answered


def chat(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}], **fields}


CLAIMS = [
    ("uuid", chat(PICTURE | {"uuid": "a" * 64})),
    ("uuid", chat(PICTURE | {"uuid": 7})),
    ("uuid", chat(PICTURE | {"uuid": {"a": 1}})),
    ("uuid", chat({"image_url": None, "uuid": "x"})),
    ("uuid", chat({"type": "image_embeds", "image_embeds": {"image_grid_thw": [1]}, "uuid": "x"})),
    ("uuid", chat({"type": "input_audio", "input_audio": {}, "uuid": "x"})),
    ("uuid", chat({"type": "text", "text": "a", "video_url": "u", "uuid": "x"})),
    ("uuid", {"requests": [chat("text"), chat(PICTURE | {"uuid": "x"})]}),
    ("uuid", {"token_ids": [1], "content_parts": [PICTURE | {"uuid": "x"}]}),
    ("uuid", {"data_1": {"content": [PICTURE | {"uuid": "x"}]}}),
    ("mm_hashes", {"token_ids": [1], "features": {"mm_hashes": {"image": ["x"]}}}),
    ("kv_transfer_params", chat("text", kv_transfer_params={})),
    ("ec_transfer_params", chat("text", ec_transfer_params={"x": {}})),
    ("kv_transfer_params", chat("text", vllm_xargs={"kv_transfer_params": 484})),
]


@pytest.mark.parametrize(("field", "request_"), CLAIMS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32", "escaped"])
async def test_client_fields_for_media_ids_and_transfers_are_refused(
    field: str, request_: dict[str, Any], encoding: str
) -> None:
    text = json.dumps(request_)
    if encoding == "escaped":
        text = text.replace(field, f"\\u{ord(field[0]):04x}{field[1:]}")
    body = text.encode("utf-8" if encoding == "escaped" else encoding)
    assert json.loads(body) == request_, "the server would read it so"
    answered = await ask(body)
    assert (answered.status, answered.reached) == (400, None)
    said = json.loads(answered.text)["error"]["message"]
    assert said == f"`{field}` is not accepted from clients; leave it out."


TOOL = {"properties": {"uuid": {"type": "string"}, "image_url": {"type": "string"}}}


@pytest.mark.parametrize(
    "request_",
    [
        chat("text"),
        chat(PICTURE, {"type": "text", "text": "what is a uuid, and what are mm_hashes?"}),
        chat(PICTURE | {"uuid": None}, kv_transfer_params=None),
        chat("text", tools=[{"type": "function", "function": {"parameters": TOOL}}]),
        chat("text", documents=[{"uuid": "4", "text": "a document"}]),
        {},
        [],
        "uuid",
    ],
)
async def test_request_without_such_fields_passes_unchanged(request_: Any) -> None:
    body = json.dumps(request_).encode()
    answered = await ask(body[:3], body[3:9], body[9:])
    assert (answered.status, answered.reached) == (200, body)


@pytest.mark.parametrize("body", [b"", b"uuid", b'{"uuid": "\xff"}', b"[" * 5000 + b'"uuid"'])
async def test_invalid_json_is_passed_to_the_server(body: bytes) -> None:
    assert (await ask(body)).reached == body


def form(*parts: tuple[str, bytes]) -> bytes:
    disposition = b"--B\r\nContent-Disposition: form-data; "
    return b"".join(
        disposition + name.encode() + b"\r\n\r\n" + value + b"\r\n" for name, value in parts
    )


SOUND = 'name="file"; filename="a.wav"', b"\0\\u{uuid: 1, transfer_params}" * 100
FORM = (("content-type", "multipart/form-data; boundary=B"),)


@pytest.mark.parametrize(
    "text",
    [
        b'{"kv_transfer_params": ["a"]}',
        b'{"a": 1, "ec_transfer_params": "b"}',
        b'{"kv\\u005ftransfer_params": "x"}',
    ],
)
@pytest.mark.parametrize("name", ['name="vllm_xargs"', "name=vllm_xargs", 'NAME="vllm_xargs"'])
async def test_transfer_params_in_forms_are_refused(text: bytes, name: str) -> None:
    body = form((name, text), SOUND) + b"--B--\r\n"
    answered = await ask(body, headers=FORM)
    assert (answered.status, answered.reached) == (400, None)
    assert b"transfer_params` is not accepted" in answered.text
    coded = b"vllm_xargs=" + quote_from_bytes(text).encode()
    answered = await ask(coded, headers=(("content-type", "application/x-www-form-urlencoded"),))
    assert answered.status == 400


@pytest.mark.parametrize("charset", ["utf-7", "cp037", "utf-16", "utf-32-be", "latin-1", "none"])
async def test_transfer_params_in_any_form_charset_are_refused(charset: str) -> None:
    text = '{"kv_transfer_params": "x"}'
    known = charset if charset != "none" else "utf-8"
    coded = text.replace("_", "+AF8-").encode() if charset == "utf-7" else text.encode(known)
    kind = f"multipart/form-data; boundary=B; charset={charset}"
    body = form(('name="vllm_xargs"', coded)) + b"--B--\r\n"
    assert (await ask(body, headers=(("content-type", kind),))).status == 400


async def test_percent_encoded_transfer_params_are_refused() -> None:
    coded = b"".join(b"%%%02x" % each for each in b'{"kv_transfer_params": "x"}')
    body = b"vllm_xargs=" + coded
    kind = "application/x-www-form-urlencoded"
    assert (await ask(body, headers=(("content-type", kind),))).status == 400


@pytest.mark.parametrize(
    ("charset", "text"),
    [("idna", b"a..b"), ("raw_unicode_escape", b'{"a": "\\ud800"}'), ("zlib", b"x"), ("\0", b"x")],
)
async def test_unknown_form_charset_is_passed_to_the_server(charset: str, text: bytes) -> None:
    kind = f"multipart/form-data; boundary=B; charset={charset}"
    body = form(('name="prompt"', text)) + b"--B--\r\n"
    assert (await ask(body, headers=(("content-type", kind),))).reached == body


async def test_audio_upload_with_harmless_fields_passes() -> None:
    texts = [
        ('name="prompt"', b"a uuid, and kv_transfer_params"),
        ('name="vllm_xargs"', b'{"a": 1}'),
    ]
    body = form(SOUND, *texts) + b"--B--\r\n"
    assert (await ask(body[:40], body[40:], headers=FORM)).reached == body
    broken = form(SOUND, *texts)[:-9]
    assert (await ask(broken, headers=FORM)).reached == broken


async def test_request_with_the_router_token_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECSHARE_ROUTER_KEY", KEY)
    body = json.dumps(CLAIMS[0][1]).encode()
    assert (await ask(body, headers=((TOKEN_HEADER, TOKEN),))).reached == body


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((TOKEN_HEADER, ""),),
        ((TOKEN_HEADER, KEY),),
        ((TOKEN_HEADER, TOKEN[:-1]),),
        ((TOKEN_HEADER, "\u00e9"),),
        ((TOKEN_HEADER, TOKEN), (TOKEN_HEADER, "x")),
        (("authorization", TOKEN),),
    ],
)
async def test_request_with_a_wrong_token_is_refused(
    monkeypatch: pytest.MonkeyPatch, headers: tuple[tuple[str, str], ...]
) -> None:
    monkeypatch.setenv("ECSHARE_ROUTER_KEY", KEY)
    assert (await ask(json.dumps(CLAIMS[0][1]).encode(), headers=headers)).status == 400


@pytest.mark.parametrize("shown", ["", TOKEN, router_token(b"")])
async def test_without_a_router_key_every_token_is_refused(
    monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    monkeypatch.delenv("ECSHARE_ROUTER_KEY", raising=False)
    body = json.dumps(CLAIMS[0][1]).encode()
    assert (await ask(body, headers=((TOKEN_HEADER, shown),))).status == 400


def test_short_router_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def server(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("never asked")

    monkeypatch.setenv("ECSHARE_ROUTER_KEY", "letmein")
    with pytest.raises(ConfigError, match="ECSHARE_ROUTER_KEY: it holds 7 bytes"):
        RouterGate(server)


async def test_body_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_BODY_BYTES", 10)
    assert (await ask(b"12345", b"67890")).status == 200
    answered = await ask(b"12345", b"67890", b"1", b"never taken")
    assert (answered.status, answered.reached) == (413, None)


async def test_other_asgi_scopes_pass() -> None:
    assert (await ask(kind="lifespan")).reached == b""
