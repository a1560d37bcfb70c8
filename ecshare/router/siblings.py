# SPDX-License-Identifier: Apache-2.0
"""What the workers of one router (`--workers`) say to each other, over sockets in a private folder.

They tell each other what they remember, by datagrams, of which any may be lost: what a worker has
not heard costs time only. And they ask each other for what operators want to see of the router.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

logger = logging.getLogger(__name__)

Hear = Callable[[bytes, bytes | None], None]
"""Receives a key and what another worker remembers under it now; None: it has forgotten the key."""
Answer = Callable[[str], bytes]
"""Returns the answer to a question with this argument."""

_MAX_TOLD_BYTES = 64 * 1024
_MAX_BURST = 100
"""How many datagrams are read at once. The loop does other work before it reads more."""
_ANSWER_TIMEOUT_S = 1.0


class _Told(Struct, array_like=True):
    topic: str
    key: bytes
    value: bytes | None


class Siblings:
    """The other workers. Belongs to the event loop's thread."""

    def __init__(self, folder: Path = Path(), number: int = 0, count: int = 1) -> None:
        """`number`: which of `count` workers this one is. `folder`: has their sockets, and is only
        accessible to this user. A router of one process has no siblings, and needs no folder.
        """
        self._folder = folder
        self.number = number
        self._others = [other for other in range(count) if other != number]
        self._hearers: dict[str, Hear] = {}
        self._answers: dict[str, Answer] = {}
        self._datagrams: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self.are_there = count > 1
        """Whether this router has several workers."""

    def hear(self, topic: str, hear: Hear) -> None:
        """Have `hear` called with what others tell of a topic."""
        self._hearers[topic] = hear

    def answer(self, question: str, answer: Answer) -> None:
        """Have `answer` called when others ask this question."""
        self._answers[question] = answer

    async def start(self) -> None:
        """Listen to the others."""
        if not self._others:
            return
        told, asked = self._path(self.number, "told"), self._path(self.number, "asked")
        for left_behind in (told, asked):  # by this worker, before it was started again
            left_behind.unlink(missing_ok=True)
        self._datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._datagrams.setblocking(False)
        self._datagrams.bind(str(told))
        asyncio.get_running_loop().add_reader(self._datagrams, self._read)
        self._server = await asyncio.start_unix_server(self._serve, asked)

    async def close(self) -> None:
        """Stop."""
        if self._datagrams is not None:
            asyncio.get_running_loop().remove_reader(self._datagrams)
            self._datagrams.close()
            self._datagrams = None
        if self._server is not None:
            self._server.close()

    def tell(self, topic: str, key: bytes, value: bytes | None) -> None:
        """Tell the others what is remembered under `key` now; None: nothing."""
        if self._datagrams is None:
            return
        message = msgspec.msgpack.encode(_Told(topic, key, value))
        if len(message) > _MAX_TOLD_BYTES:
            return
        for other in self._others:
            with contextlib.suppress(OSError):  # it is starting, or has much to read
                self._datagrams.sendto(message, str(self._path(other, "told")))

    async def ask(self, question: str, argument: str = "") -> list[tuple[int, bytes]]:
        """Return the answers of the others with their numbers. Workers that do not answer within a
        second are left out.
        """
        asked = (self._ask(other, question, argument) for other in self._others)
        both = zip(self._others, await asyncio.gather(*asked), strict=True)
        return [(other, answer) for other, answer in both if answer is not None]

    def _path(self, number: int, use: str) -> Path:
        return self._folder / f"{number}.{use}"

    def _read(self) -> None:
        assert self._datagrams is not None
        for _ in range(_MAX_BURST):
            try:
                message = self._datagrams.recv(_MAX_TOLD_BYTES)
            except OSError:
                return
            try:
                told = msgspec.msgpack.decode(message, type=_Told)
                self._hearers[told.topic](told.key, told.value)
            except (ValueError, KeyError):
                logger.warning("another worker has told what this one does not understand")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, ValueError, KeyError):
            question, _, argument = (await reader.readline()).decode().rstrip("\n").partition(" ")
            writer.write(self._answers[question](argument))
            await writer.drain()

    async def _ask(self, other: int, question: str, argument: str) -> bytes | None:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._path(other, "asked"))
                with contextlib.closing(writer):
                    writer.write(f"{question} {argument}\n".encode())
                    return await reader.read(-1) or None
        except (OSError, TimeoutError):
            return None
