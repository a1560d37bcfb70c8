# SPDX-License-Identifier: Apache-2.0
"""vLLM's own comments in a stream, behind the router: they reach the client and are no answer."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse

import pytest

from lab.servers.processes import Server
from lab.servers.router import RouterProcess
from tests.conftest import LOGS, StartEngine
from tests.releases import needs_comments

pytestmark = [pytest.mark.engine, pytest.mark.models, needs_comments]

COMMENT = b": keep-alive\n\n"
LONGEST = 3000


@contextmanager
def stream(server: Server, model: str, words: str, max_tokens: int) -> Iterator[HTTPResponse]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": words}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    asked = urllib.request.Request(
        f"{server.base_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=300) as reply:
        yield reply


def said(events: bytes) -> str:
    """Return the text in the events of a stream."""
    lines = [line for line in events.split(b"\n") if line.startswith(b"data: {")]
    choices = [json.loads(line.removeprefix(b"data: "))["choices"] for line in lines]
    return "".join(choice["delta"].get("content") or "" for each in choices for choice in each)


def test_waiting_client_gets_keep_alive_comments(engine: StartEngine) -> None:
    """The engine computes one request at a time, so a second one waits."""
    decoder = engine("decoder", "--sse-keep-alive-interval=1", "--max-num-seqs=1")
    decoder.wait_ready()
    with RouterProcess("router", LOGS / __name__, {"decoder": [decoder]}) as router:
        with stream(router, decoder.model, "What is the sea?", 5) as reply:
            expected = said(reply.read())
        assert expected
        with stream(router, decoder.model, "Tell me a story.", LONGEST) as other:
            assert other.readline().startswith(b"data: ")
            with stream(router, decoder.model, "What is the sea?", 5) as reply:
                assert reply.read(len(COMMENT)) == COMMENT
                assert reply.headers["x-ecshare-path"] is None, "nothing has begun"
                other.close()
                assert said(reply.read()) == expected
