# SPDX-License-Identifier: Apache-2.0
"""Blocking calls from many threads, and their end."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.open import open_store
from kvshare.pre_v1.blocking import BlockingSession


@pytest.fixture
def session(tmp_path: Path) -> BlockingSession:
    return BlockingSession(open_store(StoreConfig(url=str(tmp_path)), "options"), 600.0)


def told(call: Callable[[], object], words: list[str]) -> threading.Thread:
    """Have a thread call, and note what it raises."""

    def run() -> None:
        try:
            call()
        except RuntimeError as exc:
            words.append(str(exc))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_closing_ends_the_calls_that_are_running(session: BlockingSession) -> None:
    begun, words = threading.Event(), list[str]()

    async def endless() -> None:
        begun.set()
        await asyncio.Event().wait()

    thread = told(lambda: session.run(endless()), words)
    begun.wait()
    session.run_beside(endless())
    session.close()
    thread.join(10)
    assert words == ["the buffer is closed"]


def test_calls_that_come_while_it_closes_return(session: BlockingSession) -> None:
    words = list[str]()

    def call_on() -> None:
        while True:
            session.run(asyncio.sleep(0))

    threads = [told(call_on, words) for _ in range(8)]
    session.run(asyncio.sleep(0.05))
    session.close()
    session.close()
    for thread in threads:
        thread.join(10)
    assert words == ["the buffer is closed"] * 8
