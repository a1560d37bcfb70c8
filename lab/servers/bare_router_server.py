# SPDX-License-Identifier: Apache-2.0
"""A router on aiohttp that does next to nothing, to measure ecshare's router against.

    python bare_router_server.py PORT ENCODE_URL PREFILL_URL DECODE_URL

It asks the engines that ecshare's router would ask: encode for a picture that it has not seen,
prefill for a prompt that it has not seen, then decode; the last two without the pixels. It does
nothing else: it does not parse, check, count, retry or evict. It runs on the same event loop and
HTTP library. `bare_router.py` starts it.
"""

import argparse
import asyncio
import hashlib

from aiohttp import ClientSession, TCPConnector, web

from ecshare.router.api.chat import CHAT
from ecshare.router.loop import relieve_collector, run

_PIXELS, _END = b"base64,", b'"'
_STREAMS, _WHOLE = b'"stream":true', b'"stream":false'
_HEADERS = {"Content-Type": "application/json"}
_EVENTS = "text/event-stream"


class BareRouter:
    """Answers chat completions as lab/completions.py writes them."""

    def __init__(self, session: ClientSession, urls: list[str]) -> None:
        """`urls`: those of encode, prefill and decode."""
        self._session = session
        self._encode, self._prefill, self._decode = (url + CHAT for url in urls)
        self._encoded: set[bytes] = set()
        self._prefilled: set[bytes] = set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Ask each stage that has work, and forward the answer of decode."""
        body = await request.read()
        prompt, mark = body, body.find(_PIXELS)
        if mark >= 0:
            start = mark + len(_PIXELS)
            end = body.index(_END, start)
            name = hashlib.sha256(memoryview(body)[start:end]).hexdigest().encode()
            prompt = body[:start] + name + body[end:]
            if name not in self._encoded:
                await self._ask(self._encode, body)
                self._encoded.add(name)
        whole = prompt.replace(_STREAMS, _WHOLE)
        if whole not in self._prefilled:
            await self._ask(self._prefill, whole)
            self._prefilled.add(whole)
        async with self._session.post(self._decode, data=prompt, headers=_HEADERS) as reply:
            if reply.content_type != _EVENTS:
                return web.Response(body=await reply.read(), headers=_HEADERS)
            response = web.StreamResponse(headers={"Content-Type": _EVENTS})
            await response.prepare(request)
            async for piece in reply.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    async def _ask(self, url: str, body: bytes) -> None:
        async with self._session.post(url, data=body, headers=_HEADERS) as reply:
            await reply.read()


async def serve(port: int, urls: list[str]) -> None:
    """Serve until the process is ended."""
    async with ClientSession(connector=TCPConnector(limit=0)) as session:
        app = web.Application()
        app.router.add_post(CHAT, BareRouter(session, urls).answer)
        app.router.add_get("/health", _healthy)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        relieve_collector()
        await asyncio.Event().wait()


async def _healthy(_: web.Request) -> web.Response:
    return web.Response()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("urls", nargs=3)
    options = parser.parse_args()
    run(serve(options.port, options.urls))
