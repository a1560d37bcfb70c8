# SPDX-License-Identifier: Apache-2.0
"""Engines are killed and started again while clients ask: no request is lost that can be answered.

One decode engine is up at all times. A stream that has begun cannot move: it ends with an error.
tests/faults does it at length.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

from lab.completions import KINDS, Requests
from lab.http_load import Client, Message, Reply, by_clients
from lab.servers.router import RouterProcess
from lab.servers.stand_in import StandIn
from tests.waiting import until

STAGES = {"encoder": ("encode", 2), "prefiller": ("prefill", 2), "decoder": ("decode", 3)}
OPTIONS = ("--delay-ms=3", "--tokens=3")
CLIENTS = 16
PICTURE_BYTES = 20_000
HANGS_S = 600.0
"""Nothing here takes so long unless it hangs."""


class Chaos:
    """Kills and starts engines, the sooner the more is answered."""

    def __init__(self, engines: Sequence[StandIn], chance: random.Random) -> None:
        self._engines = engines
        self._chance = chance
        self.num_answered = 0
        self.num_killed: Counter[str] = Counter()
        """By stage."""

    async def go_on(self) -> None:
        """Do so until it is cancelled; the stages take turns."""
        for stage in cycle(stage for stage, _ in STAGES.values()):
            enough = self.num_answered + self._chance.randrange(5, 40)
            await until(lambda: self.num_answered >= enough, HANGS_S)  # noqa: B023
            engine = self._chance.choice([each for each in self._engines if each.stage == stage])
            if not engine.is_running():
                await asyncio.to_thread(engine.start)
                await asyncio.to_thread(engine.wait_ready)
            elif engine.stage != "decode" or self._num_others(engine):
                await asyncio.to_thread(engine.kill)
                self.num_killed[engine.stage] += 1

    def _num_others(self, engine: StandIn) -> int:
        others = (each for each in self._engines if each is not engine)
        return sum(each.is_running() for each in others if each.stage == engine.stage)


def outcome(reply: Reply) -> str:
    if reply.status == 200 and b'"choices"' in reply.body:
        is_stream = b"data: " in reply.body
        if not is_stream or reply.body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            return "whole"
        if b'data: {"error":{"message":' in reply.body:
            return "cut"
    return f"lost: {reply.status} {reply.body[:300]!r}"


async def test_none_is_lost_while_engines_come_and_go(tmp_path: Path) -> None:
    await check_none_is_lost(400, tmp_path)


async def check_none_is_lost(number: int, folder: Path) -> None:
    with ExitStack() as stack:
        engines = {
            option: [StandIn(f"{stage}-{n}", folder, stage, OPTIONS) for n in range(count)]
            for option, (stage, count) in STAGES.items()
        }
        for engine in (each for group in engines.values() for each in group):
            engine.start_in(stack)
        router = stack.enter_context(RouterProcess("router", folder, engines))
        client, requests = Client(router.port.number), Requests(PICTURE_BYTES)
        chaos = Chaos([each for group in engines.values() for each in group], random.Random(1))

        async def ask(message: Message) -> Reply:
            reply = await client.ask(message)
            chaos.num_answered += 1
            return reply

        asked = (requests.next(KINDS[n % 3], streams=bool(n % 2)) for n in range(number))
        disturbing = asyncio.create_task(chaos.go_on())
        async with asyncio.timeout(HANGS_S):
            replies = await by_clients(ask, asked, CLIENTS)
        disturbing.cancel()
        await asyncio.wait((disturbing,))
        assert disturbing.cancelled(), "engines came and went until the end"
        client.close()
    outcomes = Counter(map(outcome, replies))
    assert outcomes.keys() <= {"whole", "cut"}, outcomes
    assert outcomes.total() == number
    assert outcomes["whole"] > outcomes["cut"]
    assert chaos.num_killed.keys() == {"encode", "prefill", "decode"}
