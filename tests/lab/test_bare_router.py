# SPDX-License-Identifier: Apache-2.0
"""The least that a router can do. It asks the engines that ecshare's router asks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest

from lab.completions import NEW, TEXT, Requests
from lab.http_load import Client, Message
from lab.servers.bare_router import BareRouterProcess
from lab.servers.processes import LOOPBACK, Server
from lab.servers.router import RouterProcess
from lab.servers.stand_in_server import ANSWERS

PICTURE_BYTES = 20_000
STAGES = ("encode", "prefill", "decode")


def our_router(folder: Path, engines: Sequence[Any]) -> Server:
    stages = zip(("encoder", "prefiller", "decoder"), engines, strict=True)
    each_in_turn = ["--hand-over=after"]  # so that prefill has answered when the test looks
    return RouterProcess("router", folder, {stage: [each] for stage, each in stages}, each_in_turn)


ROUTERS: dict[str, Callable[[Path, Sequence[Any]], Server]] = {
    "bare": BareRouterProcess,
    "ours": our_router,
}


class Engine(NamedTuple):
    base_url: str


class Asked(NamedTuple):
    stage: str
    with_pixels: bool


ENCODE, PREFILL, DECODE = Asked("encode", True), Asked("prefill", False), Asked("decode", False)


@contextmanager
def recording(stage: str, asked: list[Asked]) -> Iterator[Engine]:
    """An engine that notes in `asked` what it is asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(b'{"object":"list","data":[{"id":"stand-in","object":"model"}]}')

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(Asked(stage, len(body) > PICTURE_BYTES))
            self.answer(ANSWERS[stage])

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer((LOOPBACK, 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.05,)).start()
        try:
            yield Engine(f"http://{LOOPBACK}:{server.server_port}")
        finally:
            server.shutdown()


@pytest.mark.parametrize("router", ROUTERS)
async def test_each_stage_is_asked_if_it_has_something_to_do(router: str, tmp_path: Path) -> None:
    asked: list[Asked] = []
    with ExitStack() as stack:
        engines = [stack.enter_context(recording(stage, asked)) for stage in STAGES]
        front = stack.enter_context(ROUTERS[router](tmp_path, engines))
        client = Client(front.port.number)

        async def asked_for(message: Message) -> set[Asked]:
            asked.clear()
            reply = await client.ask(message)
            assert (reply.status, reply.body) == (200, ANSWERS["decode"])
            assert len(asked) == len(set(asked))
            return set(asked)

        new, text = Requests(PICTURE_BYTES).next(NEW), Requests(PICTURE_BYTES).next(TEXT)
        another = [piece.replace(b"Question", b"Question".swapcase()) for piece in new]
        assert await asked_for(text) == {PREFILL, DECODE}
        assert await asked_for(new) == {ENCODE, PREFILL, DECODE}
        assert await asked_for(another) == {PREFILL, DECODE}
        assert await asked_for(new) == await asked_for(another) == {DECODE}
        client.close()
