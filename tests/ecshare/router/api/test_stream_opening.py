# SPDX-License-Identifier: Apache-2.0
"""How a streamed answer begins: with an answer, or with an error."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from ecshare.router.api.stream_opening import Opening, read_opening

ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
TOKEN = {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}
ERROR = {"error": {"message": "Internal server error", "code": 500}}


def event(content: Any, end: str = "\n\n") -> bytes:
    return f"data: {json.dumps(content)}{end}".encode()


async def opened(chunks: AsyncIterator[bytes]) -> Opening:
    return (await read(chunks))[0]


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
    ],
)
async def test_an_answer_is_passed_on_with_its_first_event(first: bytes) -> None:
    for chunks in ([first], [event(ROLE), first], [event(ROLE) + first[:3], first[3:]]):
        opening = await opened(pieces(*chunks, is_open=True))
        assert (opening.content, opening.error_status) == (b"".join(chunks), None)


@pytest.mark.parametrize("before", [b"", event(ROLE), event(ROLE) * 3])
async def test_an_error_is_seen_behind_the_role(before: bytes) -> None:
    for end in ("\n\n", "\r\n\r\n"):
        opening = await opened(pieces(before + event(ERROR, end), is_open=True))
        assert opening.error_status == 500
    assert (await opened(pieces(before, event({"error": {"code": 400}})))).error_status == 400
    assert (await opened(pieces(before, event({"error": {}})))).error_status == 500


async def test_an_error_may_end_with_the_stream() -> None:
    for end in ("\r\r", "\r\n\r", "\n\r"):
        assert (await opened(pieces(event(ERROR, end)))).error_status == 500


async def test_an_error_later_on_is_part_of_the_answer() -> None:
    opening = await opened(pieces(event(TOKEN) + event(ERROR)))
    assert opening.error_status is None


async def test_what_ends_or_goes_on_without_an_event_is_passed_on() -> None:
    for content in (b"", b"no event", event(ROLE)):
        assert await opened(pieces(content)) == (await opened(pieces(content, b"")))
        assert (await opened(pieces(content))).content == content
    endless = await opened(pieces(b"x" * 70_000, is_open=True))
    assert len(endless.content) == 70_000


IDLE = [
    b": keep-alive\n\n",
    b":\n",
    b": a\r\n\r\n",
    b": a\r: b\r\r\n",
    b"\n\n\r\n",
    b"retry: 10\n\n",
    b"id: 1\n\n",
    b"id: 1\r\nevent: x\r\n: data: no\r\n\r\n",
    b"data_of_another_name: 1\n\n",
    b": " + b"x" * 50_000 + b"\n\n",
]


@pytest.mark.parametrize("idle", IDLE)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
async def test_what_is_no_event_is_passed_on_and_is_no_answer(mark: bytes, idle: bytes) -> None:
    both = mark + idle
    single = [both[at : at + 1] for at in range(len(both))] if len(both) < 100 else [both]
    for chunks in ([both], single, [mark, idle], [mark[:2], mark[2:] + idle]):
        opening, passed_on = await read(pieces(*chunks, event(ERROR), is_open=True))
        assert (b"".join(passed_on) + opening.content) == idle + event(ERROR)
        assert opening.error_status == 500
    assert (await read(pieces(idle + event(ERROR))))[0].error_status == 500


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_it_does_not_matter_how_a_stream_is_cut(end: bytes) -> None:
    mark, error = b"\xef\xbb\xbf", [event(ERROR, ""), b"", b""]
    before = [b": c", event(ROLE, ""), b"", b"id: 1", b"", b": c", b"event: error"]
    for lines in ([mark, *before, *error], [mark, *error]):
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
