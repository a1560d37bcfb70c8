# SPDX-License-Identifier: Apache-2.0
"""D's answers on their way to clients: how streams begin, and what is shown."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from ecshare.router.api.answer import ClientView, Opening, PrefillUsage, read_opening
from ecshare.router.api.chat import CHAT
from ecshare.router.api.errors import Dialect
from tests.ecshare.router import answers
from tests.ecshare.router.answers import EVENTS, Answer, event, failing
from tests.ecshare.router.bodies import chat
from tests.ecshare.router.fake_engine import fleet
from tests.ecshare.router.held import streaming_until
from tests.waiting import until

ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
TOKEN = {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}
ERROR = {"error": {"message": "Internal server error", "code": 500}}


def named(*names: str) -> bytes:
    """Events of the Responses and the Messages API."""
    return b"".join(f"event: {name}\n".encode() + event({"type": name}) for name in names)


async def read(chunks: AsyncIterator[bytes]) -> tuple[Opening, list[bytes]]:
    """Return the opening, and what was passed on before it."""
    idle = []

    async def pass_on(content: bytes) -> None:
        idle.append(content)

    async with asyncio.timeout(5):
        return await read_opening(partial(anext, chunks, b""), pass_on), idle


async def pieces(*chunks: bytes, is_open: bool = False) -> AsyncIterator[bytes]:
    for chunk in filter(None, chunks):
        yield chunk
    if is_open:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    "first",
    [
        event(TOKEN),
        event({"choices": [{"delta": {"role": "assistant", "tool_calls": [{"index": 0}]}}]}),
        event({"choices": [{"delta": {"role": "assistant"}, "finish_reason": "stop"}]}),
        event({"choices": []}),
        event({"choices": [{"delta": 7}]}),
        event(TOKEN, end="\r\n\r\n"),
        event(TOKEN, end="\r\r") + b"x",
        event(TOKEN, end="\r\n\n"),
        b"event: x\nid: 1\n" + event(TOKEN),
        b'data: {"choices":\ndata: [{"delta":{"content":"a"}}]}\n\n',
        b"data: [DONE]\n\n",
        b"data:\n\n",
        b"data: \xff\n\n",
        b"data: " + b"[" * 5000 + b"\n\n",
        named("response.created", "response.output_item.added"),
        named("message_start", "content_block_start"),
    ],
)
async def test_an_answer_is_passed_on_with_its_first_event(first: bytes) -> None:
    for chunks in ([first], [event(ROLE), first], [event(ROLE) + first[:3], first[3:]]):
        opening, _ = await read(pieces(*chunks, is_open=True))
        assert (opening.content, opening.error_status) == (b"".join(chunks), None)


@pytest.mark.parametrize(
    ("stream", "status"),
    [
        (event(ERROR), 500),
        (event(ROLE) * 3 + event(ERROR, "\r\n\r\n"), 500),
        (event(ROLE) + event({"error": {"code": 400}}), 400),
        (event(ROLE) + event({"error": {}}), 500),
        *((event(ERROR, end), 500) for end in ("\r\r", "\r\n\r", "\n\r")),  # of the whole stream
        (named("response.created", "response.in_progress", "response.failed"), 500),
        (named("message_start", "ping", "error"), 500),
        (event(TOKEN) + event(ERROR), None),
    ],
)
async def test_an_error_is_seen_before_the_first_token(stream: bytes, status: int | None) -> None:
    is_open = stream.endswith(b"\n")
    for chunks in ([stream], [stream[:9], stream[9:]]):
        opening, _ = await read(pieces(*chunks, is_open=is_open))
        assert (opening.content, opening.error_status) == (stream, status)


async def test_what_ends_or_goes_on_without_an_event_is_passed_on() -> None:
    for content in (b"", b"no event", event(ROLE)):
        assert (await read(pieces(content)))[0] == Opening(content)
    endless, _ = await read(pieces(b"x" * 70_000, is_open=True))
    assert len(endless.content) == 70_000


@pytest.mark.parametrize(
    "idle",
    [
        *(b": keep-alive\n\n", b":\n", b": a\r\n\r\n", b": a\r: b\r\r\n", b"\n\n\r\n"),
        *(b"retry: 10\n\n", b"id: 1\n\n", b"id: 1\r\nevent: x\r\n: data: no\r\n\r\n"),
        *(b"data_of_another_name: 1\n\n", b": " + b"x" * 50_000 + b"\n\n"),
    ],
)
async def test_what_is_no_event_is_passed_on_and_is_no_answer(idle: bytes) -> None:
    single = [idle[at : at + 1] for at in range(len(idle))] if len(idle) < 100 else [idle]
    for chunks in ([idle], single):
        opening, passed_on = await read(pieces(*chunks, event(ERROR), is_open=True))
        assert (b"".join(passed_on) + opening.content) == idle + event(ERROR)
        assert opening.error_status == 500
    assert (await read(pieces(idle + event(ERROR))))[0].error_status == 500


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_it_does_not_matter_how_a_stream_is_cut(end: bytes) -> None:
    error = [b'data: {"error":', b'data: {"code": 500}}', b"", b""]
    before = [b": c", event(ROLE, ""), b"", b"id: 1", b"", b": c", b"event: error"]
    for lines in ([*before, *error], error):
        stream = end.join(lines)
        for at in range(1, len(stream)):
            for size in (1, 2, 7, len(stream)):
                chunks = stream[:at], stream[at : at + size], stream[at + size :]
                opening, idle = await read(pieces(*chunks))
                assert opening.error_status == 500
                assert b"data" not in b"".join(idle)


async def test_comments_do_not_wait_for_what_is_held_back() -> None:
    """The client gets them at once; the role waits for the token, or for another engine's."""
    comment = b": keep-alive\n\n"
    opening, idle = await read(pieces(event(ROLE), comment, comment, event(TOKEN)))
    assert (idle, opening.content) == ([comment] * 2, event(ROLE) + event(TOKEN))
    assert await read(pieces(b": a\n", event(TOKEN))) == (Opening(event(TOKEN)), [b": a\n"])
    within = event(TOKEN, end="\n") + comment[:-1]
    opening, idle = await read(pieces(within[:-3], within[-3:], b"\n", is_open=True))
    assert (idle, opening.content) == ([], within + b"\n")


async def test_what_is_passed_on_is_bounded() -> None:
    comment = b": " + b"x" * 1000 + b"\n\n"
    opening, idle = await read(pieces(*[comment] * 10_000, event(ERROR)))
    assert opening.error_status == 500
    assert 60_000 < sum(map(len, idle)) <= 65_536
    opening, idle = await read(pieces(b":" + b"x" * 70_000, is_open=True))
    assert (len(opening.content), idle) == (70_001, [])


OURS = {"kvshare": {"num_tokens": 39, "size": 1}}


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def chat_usage(cached: int | None, created: int | None = None) -> dict[str, Any]:
    details = {"cached_tokens": cached, "created_cache_tokens": created, "audio_tokens": 3}
    return {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": details}


def apart(new: int, read: int | None, created: int | None) -> dict[str, Any]:
    counts = {"cache_read_input_tokens": read, "cache_creation_input_tokens": created}
    given = {name: count for name, count in counts.items() if count is not None}
    return {"input_tokens": new, "output_tokens": 2, **given}


def response_usage(cached: int) -> dict[str, Any]:
    return {"input_tokens": 40, "input_tokens_details": {"cached_tokens": cached}}


USAGES = [
    (Dialect.OPENAI, chat_usage(39, 1), chat_usage(16, 24), chat_usage(16, 24)),
    (Dialect.OPENAI, chat_usage(39, 1), chat_usage(0, 40), chat_usage(0, 40)),
    (Dialect.OPENAI, chat_usage(39, 1), None, chat_usage(None)),
    (Dialect.OPENAI, chat_usage(39, 1), {"prompt_tokens": 40}, chat_usage(None)),
    (Dialect.OPENAI, chat_usage(39, 1), {"prompt_tokens_details": 5}, chat_usage(None)),
    (Dialect.RESPONSES, response_usage(39), response_usage(16), response_usage(16)),
    (Dialect.RESPONSES, response_usage(39), None, response_usage(0)),
    (Dialect.ANTHROPIC, apart(1, 39, 0), apart(24, 16, 0), apart(24, 16, 0)),
    (Dialect.ANTHROPIC, apart(1, 39, 0), apart(40, None, None), apart(40, None, None)),
    (Dialect.ANTHROPIC, apart(0, 39, 1), None, apart(40, None, None)),
]


@pytest.mark.parametrize(("dialect", "of_decode", "of_prefill", "shown"), USAGES)
def test_what_prefill_computed_does_not_count_as_cached(
    dialect: Dialect, of_decode: Any, of_prefill: Any, shown: Any
) -> None:
    view = ClientView(dialect, PrefillUsage(was_asked=True, told=of_prefill))
    before, after = {"id": "a", "choices": ["ü"]}, {"x": None}
    body = compact({**before, "usage": of_decode, **after})
    assert json.loads(view.whole(body)) == {**before, "usage": shown, **after}
    for told in (
        {"usage": of_decode},
        {"type": "response.completed", "response": {"usage": of_decode}},
        {"type": "message_start", "message": {"usage": of_decode}},
    ):
        chunk = view.chunk(b"event: x\ndata: " + compact(told) + b"\n\n")
        expected = json.loads(compact(told).replace(compact(of_decode), compact(shown)))
        head, data = chunk.split(b"data:")
        assert head == b"event: x\n"
        assert json.loads(data) == expected
    alone = ClientView(dialect, PrefillUsage())
    assert alone.whole(body) == body


@pytest.mark.parametrize("spaced", [False, True])
def test_transfer_params_stay_in_the_fleet(spaced: bool) -> None:
    def written(value: Any) -> bytes:
        return json.dumps(value).encode() if spaced else compact(value)

    text = 'it says \\"kv_transfer_params\\":{"kvshare":{"num_tokens":39,"size":1}}'
    body = {"text": text, "kv_transfer_params": OURS, "ec_transfer_params": {"u": {}}, "z": 1}
    shown = json.loads(ClientView(Dialect.OPENAI, PrefillUsage()).whole(written(body)))
    assert shown == body | {"kv_transfer_params": None, "ec_transfer_params": None}
    told = b"data: " + written({"type": "response.completed", "response": body}) + b"\n\n"
    chunk = ClientView(Dialect.RESPONSES, PrefillUsage()).chunk(told)
    assert json.loads(chunk[5:])["response"] == shown


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"a":1,"kv_transfer_params":{"k":[1]},"b":2}', b'{"a":1,"b":2}'),
        (b'{"kv_transfer_params":{"k":[1]},"b":2}', b'{"b":2}'),
        (b'{"a":1,"kv_transfer_params":{"k":[1]}}', b'{"a":1}'),
        (b'{"kv_transfer_params":{"k":1},"ec_transfer_params":{"k":1}}', b"{}"),
    ],
)
def test_messages_have_no_such_fields(body: bytes, shown: bytes) -> None:
    assert ClientView(Dialect.ANTHROPIC, PrefillUsage()).whole(body) == shown


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params": null, "usage" :{"prompt_tokens_details":null}}',
        b'{ "error" : {"message":"cached_tokens"} }', b"cached_tokens", b"[1,\"cached_tokens\"]",
        b'{"usage":[1,"cached_tokens"]}', b'{"usage":null,"a":"cached_tokens"}', b"",
        b'{"message":"cached_tokens"}', b'{"a":' * 2000 + b'"cached_tokens"' + b"}" * 2000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("dialect", [Dialect.OPENAI, Dialect.ANTHROPIC])
def test_all_else_is_shown_as_it_is(body: bytes, dialect: Dialect) -> None:
    view = ClientView(dialect, PrefillUsage(was_asked=True, told=chat_usage(1)))
    assert view.whole(body) == body
    assert view.chunk(b"data: " + body + b"\n\n") == b"data: " + body + b"\n\n"


@pytest.mark.parametrize("line", [b"\n", b"\r\n", b"\r"])
def test_events_may_come_in_any_pieces(line: bytes) -> None:
    usage = {"usage": chat_usage(39, 1), "kv_transfer_params": OURS}
    texts = [b": ping", b"data: " + compact({"a": "ü" * 300}), b"event: e" + line + b"data: {}"]
    last = b"data: " + compact(usage)
    stream = b"".join(each + 2 * line for each in (*texts, last, b"data: [DONE]"))
    shown = {"usage": chat_usage(16, 24), "kv_transfer_params": None}
    chance = random.Random(1)
    for _ in range(200):
        view = ClientView(Dialect.OPENAI, PrefillUsage(True, chat_usage(16, 24)))
        cuts = sorted(chance.randrange(len(stream)) for _ in range(chance.randrange(12)))
        pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        told = b"".join([*map(view.chunk, pieces), view.end()])
        *same, changed, done, _ = told.split(2 * line)
        assert same == texts
        assert done == b"data: [DONE]"
        assert json.loads(changed[5:]) == shown


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_a_line_waits_for_no_other_one(end: bytes) -> None:
    """A comment keeps the connection in use, and needs no empty line behind it."""
    view = ClientView(Dialect.OPENAI, PrefillUsage())
    for line in (b": ping", b"event: a", b"data: {}", b"", b": ping"):
        assert view.chunk(line + end) == line + end
    assert view.chunk(b": ping" + end + b"data: {") == b": ping" + end
    assert view.chunk(b"}" + end) == b"data: {}" + end


def test_a_line_without_end_is_not_kept() -> None:
    view = ClientView(Dialect.OPENAI, PrefillUsage())
    piece = b"data: " + b"x" * (1 << 20)
    told = [len(view.chunk(piece)) for _ in range(20)]
    told.append(len(view.end()))
    assert max(told) <= 17 * len(piece)
    assert sum(told) == 20 * len(piece)


def test_usage_is_what_the_last_of_an_answer_tells() -> None:
    told = {"usage": {"prompt_tokens": 1}}
    events: list[Any] = [{"usage": {}}, {"response": told}, {"text": "usage"}]
    whole, stream = ClientView(), ClientView()
    whole.whole(compact({"text": "x" * 100_000, **told}))
    for each in events:
        stream.chunk(event(each))
    assert whole.usage() == stream.usage() == told
    assert ClientView().usage() == {}


def telling(usage: Any, **fields: Any) -> Answer:
    """Answer as P and D do, with this usage at the end."""
    told = {"choices": [], "usage": usage, **fields}
    stream = answers.streaming(EVENTS[0], event(told), EVENTS[-1])
    return answers.either(answers.answering(**told), stream)


def usage_of(body: bytes) -> Any:
    last = body.removesuffix(b"\n\ndata: [DONE]\n\n").split(b"data: ")[-1]
    return json.loads(last)["usage"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cold_prompt_and_a_warm_one(stream: bool) -> None:
    async with fleet(0, 1) as f:
        f.p.answer = telling(chat_usage(0, 40), kv_transfer_params=OURS)
        f.d.answer = telling(chat_usage(39, 1), kv_transfer_params=OURS)
        for path, usage in (("prefill,decode", (0, 40)), ("decode", (39, 1))):
            response, body = await f.post(chat(stream=stream))
            assert response.headers["x-ecshare-path"] == path
            assert usage_of(body) == chat_usage(*usage)
            assert b"kvshare" not in body
        assert f.count("prefills", "lost") == 0


@pytest.mark.parametrize("of_prefill", [answers.hang_up, failing(500), None])
async def test_a_prefill_engine_that_fails_may_have_stored_some(of_prefill: Answer | None) -> None:
    """Unless it cannot be reached: None."""
    gone = ("http://127.0.0.1:9",) if of_prefill is None else ()
    async with fleet(0, not gone, prefillers_more=gone) as f:
        for engine in f.prefillers:
            engine.answer = of_prefill or engine.answer
        f.d.answer = telling(chat_usage(39, 1))
        response, body = await f.post(chat())
        assert response.status == 200
        assert usage_of(body) == (chat_usage(39, 1) if of_prefill is None else chat_usage(None))


@pytest.mark.usefixtures("short_is_long")
async def test_prefill_may_answer_after_decode_has_begun() -> None:
    """The usage at the end of the stream is P's all the same; and null if P never answers."""
    streamed = {"kvshare": {"streamed": True, "num_tokens": 39}}
    goes_on, last = asyncio.Event(), event({"usage": chat_usage(39, 1)})
    async with fleet(0, 1, prefill="always") as f:
        of_p = telling(chat_usage(0, 40), kv_transfer_params=streamed)
        f.p.answer = of_p
        await f.post(chat())
        f.d.answer = streaming_until(goes_on, last)
        for in_time in (True, False):
            held = f.p.hold(of_p)
            goes_on.clear()
            async with f.client.post(f.url + CHAT, json=chat(stream=True)) as response:
                assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
                if in_time:
                    held.let_go.set()
                    await until(lambda: not f.in_flight("prefill"))
                goes_on.set()
                rest = await response.read()
            assert usage_of(rest) == (chat_usage(0, 40) if in_time else chat_usage(None))
