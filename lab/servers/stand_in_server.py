# SPDX-License-Identifier: Apache-2.0
"""An engine that computes nothing: it reads a chat completion and answers the same each time.

    python stand_in_server.py STAGE PORT [--delay-ms MS] [--tokens N] [--chars N] [--holds]

STAGE is encode, prefill or decode. It uses only the standard library and runs as a file, so that it
starts in 50 ms, and parses no more of a request than necessary. `stand_in.py` starts it.
"""

import argparse
import asyncio
import signal

COMPLETIONS = b"POST /v1/chat/completions "
RELEASE = b"POST /release "
"""The path that ends all held streams."""
_STREAMS = b'"stream":true'
_BACKLOG = 4096
_MODELS = b'{"object":"list","data":[{"id":"stand-in","object":"model"}]}'
_ENCODED = (
    b'{"ec_transfer_params":{"item":{"metadata":{"image_grid_thw":[1,16,16]},"item_indices":[0]}}}'
)
_PREFILLED = (
    b'{"choices":[{"index":0,"message":{"role":"assistant","content":"a"}}],'
    b'"usage":{"prompt_tokens":17},"kv_transfer_params":{"kvshare":{"num_tokens":16}}}'
)
_DECODED = (
    b'{"id":"1","object":"chat.completion","model":"stand-in","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"a b c"},"finish_reason":"stop"}]}'
)
ANSWERS = {"encode": _ENCODED, "prefill": _PREFILLED, "decode": _DECODED}
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_ROLE = b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'


def whole(body: bytes) -> bytes:
    """Return an answer with its head."""
    return _HEAD % len(body) + body


def token(num_chars: int) -> bytes:
    """Return the event of a token."""
    return b'{"choices":[{"index":0,"delta":{"content":"%b"}}]}' % (b"a" * num_chars)


def chunk(event: bytes) -> bytes:
    """Return an event of a stream as one chunk."""
    return b"%x\r\ndata: %b\n\n\r\n" % (len(event) + 8, event)


LAST = chunk(b"[DONE]") + b"0\r\n\r\n"


class Engine:
    """The state that all connections of an engine share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.answer = whole(ANSWERS[options.stage])
        self.delay_s = options.delay_ms / 1e3
        self.num_tokens = options.tokens
        self.token = chunk(token(options.chars))
        self.holds = options.holds
        self.released = asyncio.Event()


class Connection(asyncio.Protocol):
    """One connection, for one request after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._head = b""
        self._line = b""
        self._missing_bytes = 0
        self._tail = b""
        self._streams = False
        self._transport: asyncio.Transport
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop answering."""
        if self._answering is not None:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        """Take a piece of a request. Clients do not send the next one before the answer."""
        if not self._line:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._begin(head)
        self._missing_bytes -= len(data)
        self._tail = self._tail[-len(_STREAMS) :] + data
        self._streams = self._streams or _STREAMS in self._tail
        if self._missing_bytes <= 0:
            line, streams = self._line, self._streams
            self._head, self._line, self._tail, self._streams = b"", b"", b"", False
            self._reply(line, streams=streams)

    def _begin(self, head: bytes) -> None:
        self._line, *fields = head.split(b"\r\n")
        lengths = (each for each in fields if each[:15].lower() == b"content-length:")
        self._missing_bytes = int(next(lengths, b":0").partition(b":")[2])

    def _reply(self, line: bytes, *, streams: bool) -> None:
        engine = self._engine
        if line.startswith(RELEASE):
            engine.released.set()
            engine.released = asyncio.Event()  # for later streams
            self._transport.write(whole(b"{}"))
        elif not line.startswith(COMPLETIONS):
            self._transport.write(whole(_MODELS))  # the health check gets them too
        elif streams or engine.delay_s:
            self._answering = asyncio.create_task(self._answer(streams=streams))
        else:
            self._transport.write(engine.answer)

    async def _answer(self, *, streams: bool) -> None:
        engine = self._engine
        await asyncio.sleep(engine.delay_s)
        if not streams:
            self._transport.write(engine.answer)
            return
        self._transport.write(_STREAM_HEAD + chunk(_ROLE))
        for _ in range(engine.num_tokens):
            self._transport.write(engine.token)
            await asyncio.sleep(engine.delay_s)
        if engine.holds:
            await engine.released.wait()
        self._transport.write(LAST)


async def serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    engine = Engine(options)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await loop.create_server(
        lambda: Connection(engine), "127.0.0.1", options.port, backlog=_BACKLOG
    )
    await stop.wait()


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=sorted(ANSWERS))
    parser.add_argument("port", type=int)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="before each token")
    parser.add_argument("--tokens", type=int, default=3, help="of a stream")
    parser.add_argument("--chars", type=int, default=1, help="of a token")
    parser.add_argument("--holds", action="store_true", help="end no stream before /release")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(serve(parsed()))
