# SPDX-License-Identifier: Apache-2.0
"""The router's log: no line is a client's, and none can flood it."""

import asyncio
import io
import logging
from collections.abc import Iterator

import pytest

from ecshare.router.logs import OneLineFormatter, RateLimitFilter
from tests.ecshare.router.answers import decoded
from tests.ecshare.router.fake_engine import Clock, FakeEngine
from tests.ecshare.router.router_process import router_process


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def written(clock: Clock) -> Iterator[io.StringIO]:
    """What a logger of the tests writes, set up as the router's."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLineFormatter("%(levelname)s %(message)s"))
    handler.addFilter(RateLimitFilter(clock))
    logger = logging.getLogger("tests.router.logs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)


def warn(number: int) -> None:
    for each in range(number):
        logging.getLogger("tests.router.logs").warning("warning %d", each)


def test_a_flood_of_warnings_is_a_few_lines_that_count_the_rest(
    written: io.StringIO, clock: Clock
) -> None:
    warn(1000)
    logging.getLogger("tests.router.logs").error("another")
    assert written.getvalue().splitlines() == [
        *(f"WARNING warning {each}" for each in range(5)), "ERROR another",
    ]  # fmt: skip
    clock.now_s = 9.9
    warn(10)
    assert len(written.getvalue().splitlines()) == 6
    clock.now_s = 10.0
    warn(2)
    clock.now_s = 20.0
    warn(1)
    assert written.getvalue().splitlines()[6:] == [
        "WARNING warning 0 (1005 more like this were left out)",
        "WARNING warning 1",
        "WARNING warning 0",
    ]


def test_what_was_asked_for_is_written_whole(written: io.StringIO) -> None:
    for each in range(100):
        logging.getLogger("tests.router.logs").info("request %d", each)
    assert len(written.getvalue().splitlines()) == 100


def test_control_characters_are_shown_as_escapes(written: io.StringIO) -> None:
    logger = logging.getLogger("tests.router.logs")
    logger.info("a\nINFO forged\r\x1b[31m\x00\x7f\x9b\u2028%s", "\u2029\té")
    assert written.getvalue() == (
        "INFO a\\x0aINFO forged\\x0d\\x1b[31m\\x00\\x7f\\x9b\\x2028\\x2029\\x09é\n"
    )
    logger.error("failed", exc_info=ValueError("a traceback has lines"))
    assert written.getvalue().endswith("ERROR failed\nValueError: a traceback has lines\n")


async def test_the_router_writes_its_log_so() -> None:
    async with (
        FakeEngine(decoded).serving() as engine,
        router_process(engine.url) as router,
    ):
        for _ in range(100):
            reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
            writer.write(b"GET /\x1b[31m HTTP/1.1\r\nA: b\x00\x1b[31m\r\n\r\n")
            assert b" 400 Bad Request" in await reader.readline()
            writer.close()
            await writer.wait_closed()
    lines = router.log.splitlines()
    assert all(line.isprintable() for line in lines)
    assert 5 <= sum("malformed HTTP" in line for line in lines) < 50
    assert not any("Traceback" in line for line in lines)
