# SPDX-License-Identifier: Apache-2.0
"""How a streamed answer begins: with an answer, or with an error."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ecshare.router.events import read_opening

ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
TOKEN = {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}
ERROR = {"error": {"message": "Internal server error", "code": 500}}


def event(content: Any, end: str = "\n\n") -> bytes:
    return f"data: {json.dumps(content)}{end}".encode()


async def pieces(*chunks: bytes, is_open: bool = False) -> AsyncIterator[bytes]:
    for chunk in chunks:
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
        b"data: [DONE]\n\n",
        b": a comment\n\n",
        b"data: \xff\n\n",
        b"data: " + b"[" * 5000 + b"\n\n",
    ],
)
async def test_an_answer_is_passed_on_with_its_first_event(first: bytes) -> None:
    for chunks in ([first], [event(ROLE), first], [event(ROLE) + first[:3], first[3:]]):
        opening = await asyncio.wait_for(read_opening(pieces(*chunks, is_open=True)), 5)
        assert (opening.content, opening.error_status) == (b"".join(chunks), None)


@pytest.mark.parametrize("before", [b"", event(ROLE), event(ROLE) * 3])
async def test_an_error_is_seen_behind_the_role(before: bytes) -> None:
    for end in ("\n\n", "\r\n\r\n"):
        opening = await read_opening(pieces(before + event(ERROR, end), is_open=True))
        assert opening.error_status == 500
    assert (await read_opening(pieces(before, event({"error": {"code": 400}})))).error_status == 400
    assert (await read_opening(pieces(before, event({"error": {}})))).error_status == 500


async def test_an_error_later_on_is_part_of_the_answer() -> None:
    opening = await read_opening(pieces(event(TOKEN) + event(ERROR)))
    assert opening.error_status is None


async def test_what_ends_or_goes_on_without_an_event_is_passed_on() -> None:
    for content in (b"", b"no event", event(ROLE)):
        assert await read_opening(pieces(content)) == (await read_opening(pieces(content, b"")))
        assert (await read_opening(pieces(content))).content == content
    async with asyncio.timeout(5):
        endless = await read_opening(pieces(b"x" * 70_000, is_open=True))
    assert len(endless.content) == 70_000
