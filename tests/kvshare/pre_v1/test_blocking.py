# SPDX-License-Identifier: Apache-2.0
"""Blocking calls from many threads, and their end."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.open import open_store
from kvshare.pre_v1.blocking import BlockingClient


@pytest.fixture
def client(tmp_path: Path) -> BlockingClient:
    return BlockingClient(open_store(StoreConfig(url=str(tmp_path)), "options"), 600.0)


def call_in_thread(call: Callable[[], object], words: list[str]) -> threading.Thread:
    """Make calls in a thread, and record what they raise."""

    def run() -> None:
        try:
            call()
        except RuntimeError as exc:
            words.append(str(exc))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_closing_ends_the_calls_that_are_running(client: BlockingClient) -> None:
    begun, words = threading.Event(), list[str]()

    async def endless() -> None:
        begun.set()
        await asyncio.Event().wait()

    thread = call_in_thread(lambda: client.run(endless()), words)
    begun.wait()
    client.close()
    thread.join(10)
    assert words == ["the buffer is closed"]


def test_calls_during_close_return(client: BlockingClient) -> None:
    words, calling = list[str](), threading.Barrier(9)

    def call_on() -> None:
        client.run(asyncio.sleep(0))
        calling.wait(10)
        while True:
            client.run(asyncio.sleep(0))

    threads = [call_in_thread(call_on, words) for _ in range(8)]
    calling.wait(10)
    client.close()
    client.close()
    for thread in threads:
        thread.join(10)
    assert words == ["the buffer is closed"] * 8
