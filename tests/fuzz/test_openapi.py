# SPDX-License-Identifier: Apache-2.0
"""Bodies generated from the router's own description, valid ones and changed ones.

Each gets an answer that the description allows; none is a 5xx, and no stream hangs.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from ecshare.router.api.chat import CHAT
from tests.ecshare.router.answers import EVENTS
from tests.ecshare.router.fake_engine import Fleet, fleet
from tests.fuzz.description import description
from tests.fuzz.openapi import SCHEMAS, check_answer, fitting, schema_of, validator
from tests.fuzz.running import fuzzed
from tests.fuzz.values import mutated, written

pytestmark = pytest.mark.fuzz

HANGS_S = 60.0
PATHS = sorted(path for path, methods in description()["paths"].items() if "post" in methods)
BODIES = {path: fitting(SCHEMAS[schema_of(path)]) for path in PATHS}
# Half of them at the endpoint that most clients use.
endpoints = st.just(CHAT) | st.sampled_from(PATHS)
good = endpoints.flatmap(lambda path: st.tuples(st.just(path), BODIES[path]))
odd = endpoints.flatmap(lambda path: st.tuples(st.just(path), BODIES[path].flatmap(mutated)))


async def unsure(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """An encoder that reports no embeddings: the next stages get the pixels."""
    return web.json_response({})


class Served:
    """A router on a socket, in an event loop that runs only during a request."""

    def __init__(self, runner: asyncio.Runner, f: Fleet) -> None:
        self._runner = runner
        self._fleet = f

    def ask(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        async def asked() -> tuple[int, str, bytes]:
            async with asyncio.timeout(HANGS_S):
                response, answer = await self._fleet.post(body, path=path)
            return response.status, response.content_type, answer

        return self._runner.run(asked())


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with asyncio.Runner() as runner:
        running = fleet(allow_media_domains=("nowhere.example",))  # nothing is fetched
        f = runner.run(running.__aenter__())
        f.e.answer = unsure
        yield Served(runner, f)
        runner.run(running.__aexit__(None, None, None))


def check(served: Served, path: str, body: Any) -> int:
    status, content_type, answer = served.ask(path, written(body))
    assert status < 500, answer
    check_answer(path, "post", status, content_type, answer)
    if status == 200 and content_type == "text/event-stream":
        assert answer == b"".join(EVENTS)
    return status


@fuzzed(80)
@given(asked=good)
def test_valid_bodies_get_a_described_answer(served: Served, asked: tuple[str, Any]) -> None:
    path, body = asked
    validator(schema_of(path)).validate(body)
    check(served, path, body)


@fuzzed(120)
@given(asked=odd)
def test_changed_bodies_get_a_described_answer(served: Served, asked: tuple[str, Any]) -> None:
    path, body = asked
    status = check(served, path, body)
    assert status != 200 or isinstance(body, dict)
