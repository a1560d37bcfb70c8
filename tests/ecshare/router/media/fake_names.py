# SPDX-License-Identifier: Apache-2.0
"""A name server on this host, for tests, and a router that asks it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import pytest

from ecshare.router.media import fetcher
from ecshare.router.media.hosts import MediaNames

SILENT = "silent.test"
_ANSWER, _NO_SUCH_NAME = 0x8180, 0x8183
_IPV4 = 1


@dataclass
class NameServer(asyncio.DatagramProtocol):
    """Answers for the names it knows; says nothing of those that end with SILENT."""

    known: Mapping[str, Sequence[str]]
    asked: list[str] = field(default_factory=list)
    """The names that it was asked for, one for each question and family."""
    address: str = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        name, end = _name(data)
        self.asked.append(name)
        if name.endswith(SILENT):
            return
        question = data[12 : end + 4]
        kind = int.from_bytes(data[end : end + 2])
        found = self.known.get(name, ()) if kind == _IPV4 else ()
        status = _ANSWER if name in self.known else _NO_SUCH_NAME
        head = [status, 1, len(found), 0, 0]
        records = [
            b"\xc0\x0c" + bytes((0, 1, 0, 1, 0, 0, 0, 60, 0, 4)) + socket.inet_aton(each)
            for each in found
        ]
        answer = data[:2] + b"".join(number.to_bytes(2) for number in head) + question
        self._transport.sendto(answer + b"".join(records), addr)


def _name(data: bytes) -> tuple[str, int]:
    """Return the name that is asked for, and where the text behind it begins."""
    labels, at = [], 12
    while length := data[at]:
        labels.append(data[at + 1 : at + 1 + length].decode().lower())
        at += 1 + length
    return ".".join(labels), at + 1


@asynccontextmanager
async def name_server(known: Mapping[str, Sequence[str]]) -> AsyncIterator[NameServer]:
    """Serve the names on a socket of its own."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(
        lambda: NameServer(known), local_addr=("127.0.0.1", 0)
    )
    host, port = transport.get_extra_info("sockname")
    server.address = f"{host}:{port}"
    try:
        yield server
    finally:
        transport.close()


@asynccontextmanager
async def routers_ask(
    monkeypatch: pytest.MonkeyPatch, known: Mapping[str, Sequence[str]]
) -> AsyncIterator[NameServer]:
    """Serve the names; routers that start in the block ask for those of media's hosts."""
    async with name_server(known) as server:
        with monkeypatch.context() as patch:
            patch.setattr(fetcher, "MediaNames", partial(MediaNames, servers=[server.address]))
            yield server
