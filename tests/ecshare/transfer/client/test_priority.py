# SPDX-License-Identifier: Apache-2.0
import asyncio
from contextlib import AsyncExitStack

import pytest

from ecshare.transfer.client.priority import Admission, Priority

MIB = 1 << 20


class Turns:
    """Operations that hold their slot until the test ends them."""

    def __init__(self) -> None:
        self.admission = Admission(10.0, grows=True)
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, priority: Priority, cost_bytes: int = 0) -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._hold(name, priority, cost_bytes))
        await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await settle()

    async def _hold(self, name: str, priority: Priority, cost_bytes: int) -> None:
        async with self.admission.admitted(priority, cost_bytes):
            self.begun.append(name)
            await self._ends[name].wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def turns() -> Turns:
    return Turns()


async def test_loads_precede_lookups_and_lookups_precede_saves(turns: Turns) -> None:
    await turns.ask("large", Priority.LOAD, 97 * MIB)
    await turns.ask("save", Priority.SAVE)
    await turns.ask("load", Priority.LOAD, 1)
    await turns.ask("later save", Priority.SAVE)
    await turns.ask("look-up", Priority.LOOK_UP)
    assert turns.begun == ["large", "save"], "a load waits for bytes, and nothing overtakes it"
    await turns.end("large")
    assert turns.begun == ["large", "save", "load", "look-up", "later save"]


async def test_gap_markers_do_not_wait_for_saves(turns: Turns) -> None:
    await turns.ask("save", Priority.SAVE, 500 * MIB)
    await turns.ask("later save", Priority.SAVE, 1)
    await turns.ask("note", Priority.NOTE)
    assert turns.begun == ["save", "note"]


async def test_bytes_in_flight_are_bounded_but_a_single_load_may_exceed(turns: Turns) -> None:
    await turns.ask("huge", Priority.LOAD, 500 * MIB)
    await turns.ask("tiny", Priority.LOAD, 1)
    assert turns.begun == ["huge"]
    await turns.end("huge")
    await turns.ask("huge again", Priority.LOAD, 500 * MIB)
    assert turns.begun == ["huge", "tiny"]
    await turns.end("tiny")
    assert turns.begun == ["huge", "tiny", "huge again"]


async def test_number_of_operations_in_flight_is_bounded(turns: Turns) -> None:
    for number in range(40):
        await turns.ask(str(number), Priority.LOAD)
    assert len(turns.begun) == 32
    await turns.end("0")
    assert turns.begun[-1] == "32"


async def test_cancelled_waiter_does_not_block_the_queue(turns: Turns) -> None:
    await turns.ask("first", Priority.LOAD, 97 * MIB)
    await turns.ask("given up", Priority.LOAD, 1)
    await turns.ask("save", Priority.SAVE)
    assert turns.begun == ["first"]
    await turns.cancel("given up")
    assert turns.begun == ["first", "save"]


async def test_cancelled_operation_frees_its_slot(turns: Turns) -> None:
    await turns.ask("first", Priority.LOAD, 97 * MIB)
    await turns.ask("second", Priority.LOAD, 97 * MIB)
    await turns.cancel("first")
    assert turns.begun == ["first", "second"]
    await turns.cancel("second")
    await turns.ask("third", Priority.LOAD, 97 * MIB)
    assert turns.begun == ["first", "second", "third"]


async def test_operation_cancelled_right_after_admission_frees_its_slot() -> None:
    admission, first = Admission(10.0, grows=False), AsyncExitStack()
    await first.enter_async_context(admission.admitted(Priority.LOAD, 97 * MIB))

    async def enter() -> None:
        async with admission.admitted(Priority.LOAD, 97 * MIB):
            raise AssertionError("it was cancelled before")

    waiting = asyncio.create_task(enter())
    await settle()
    await first.aclose()  # admits the other operation before its task runs
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    async with asyncio.timeout(5), admission.admitted(Priority.LOAD, 97 * MIB):
        pass
