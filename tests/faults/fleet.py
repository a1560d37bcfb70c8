# SPDX-License-Identifier: Apache-2.0
"""Three engines: a plain one that gives the expected tokens, an encoder, and a consumer."""

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from lab.servers import openai_client as client
from lab.servers.engines import EngineProcess
from lab.servers.processes import Server
from tests.engines.chat import Answer, announced, ask, counts, picture, text
from tests.waiting import wait_until

QUESTION = text("what is to be seen here, and where?")
LOADED = "ecshare_items/loaded"
# Short, so that a case ends soon, and long enough for two busy cores.
SHORT_WAITS = {"wait_s": 2.0, "io_timeout_s": 1.5}
RECOVERS_WITHIN_S = 90.0  # the engine pauses up to 30 s after store errors
NUM_PICTURES = 5

_numbers = itertools.count()


@dataclass(frozen=True)
class Item:
    """A picture that the encoder has announced."""

    uuid: str
    seed: int
    content: dict[str, Any]
    params: dict[str, Any]


@dataclass
class Fleet:
    """The engines, and requests to them. Every request with a picture asks QUESTION."""

    plain: EngineProcess
    encoder: EngineProcess
    consumer: EngineProcess
    _expected: dict[int, list[int]] = field(default_factory=dict)

    def wait_ready(self) -> Self:
        for engine in (self.plain, self.encoder, self.consumer):
            engine.wait_ready()
        expected = [self.expected(seed) for seed in range(NUM_PICTURES)]
        assert len({tuple(tokens) for tokens in expected}) == NUM_PICTURES, "pictures look alike"
        return self

    def expected(self, seed: int) -> list[int]:
        if seed not in self._expected:
            answer = ask(self.plain, self.plain.model, [picture(seed), QUESTION])
            self._expected[seed] = answer.tokens
        return self._expected[seed]

    def encode(self, uuid: str = "", seed: int = -1) -> Item:
        """Have a picture encoded: this one, or a new one."""
        if not uuid:
            uuid, seed = new_uuid()
        answer = ask(self.encoder, self.encoder.model, [picture(seed, uuid)])
        return Item(uuid, seed, announced(answer, uuid), answer.body["ec_transfer_params"])

    def store(self) -> Item:
        """Have a new picture encoded, and return when it is stored."""
        raise NotImplementedError

    def without_pixels(self, item: Item) -> Answer:
        """Ask the consumer about an announced item, without its pixels."""
        params = {"ec_transfer_params": item.params}
        return ask(self.consumer, self.consumer.model, [item.content, QUESTION], **params)

    def is_right(self, item: Item, answer: Answer) -> bool:
        """Whether the request succeeded. Wrong tokens are an error."""
        if answer.status != 200:
            assert 500 <= answer.status < 600, answer
            return False
        assert answer.tokens == self.expected(item.seed)
        return True

    def check_with_pixels(self, uuid: str = "", seed: int = -1) -> None:
        """Check that a request with pixels gives the expected tokens, whatever the store does."""
        if not uuid:
            uuid, seed = new_uuid()
        answer = ask(self.consumer, self.consumer.model, [picture(seed, uuid), QUESTION])
        assert answer.tokens == self.expected(seed)

    def check_announced(self, item: Item) -> None:
        """Check that a request without pixels gives the expected tokens or a retryable error."""
        self.is_right(item, self.without_pixels(item))

    def check_recovers(self, lost: Item | None = None) -> None:
        """Check that new pictures pass through the store again, and `lost` once it is encoded."""
        before = counts(self.consumer).get(LOADED, 0)
        self._wait_through(None, "nothing passes through the store again")
        assert counts(self.consumer)[LOADED] > before
        if lost is not None:
            self._wait_through(lost, "what was lost is not stored again")

    def _wait_through(self, item: Item | None, otherwise: str) -> None:
        wait_until(lambda: self._goes_through(item), RECOVERS_WITHIN_S, otherwise, pause_s=0.2)

    def _goes_through(self, item: Item | None) -> bool:
        sent = self.encode(item.uuid, item.seed) if item else self.encode()
        return self.is_right(sent, self.without_pixels(sent))


def new_uuid() -> tuple[str, int]:
    """A new identity, and the seed of its picture."""
    number = next(_numbers)
    return f"picture-{number}", number % NUM_PICTURES


class Engines(Protocol):
    """An engine that gives the expected tokens, and one that is compared with it."""

    plain: EngineProcess
    consumer: EngineProcess


class Decoding(threading.Thread):
    """Text requests, one after the other, that use no store.

    As a context manager: they run during the block, and it raises if one has wrong tokens.
    """

    BODY = client.question("tell me about the sea", max_tokens=150) | {"ignore_eos": True}

    def __init__(self, fleet: Engines) -> None:
        super().__init__(name="decoding", daemon=True)
        self._server: Server = fleet.consumer
        self._expected = client.ask(fleet.plain.base_url, self.BODY).token_ids
        self._answers: list[tuple[int, ...]] = []
        self._error: Exception | None = None
        self._is_over = threading.Event()

    def run(self) -> None:
        try:
            while not self._is_over.is_set():
                answer = client.ask(self._server.base_url, self.BODY, stream=True)
                self._answers.append(answer.token_ids)
        except Exception as exc:  # noqa: BLE001 - raised again in the test's thread
            self._error = exc

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self._is_over.set()
        self.join()
        if kind is None:
            if self._error is not None:
                raise self._error
            assert self._answers
            assert set(self._answers) == {self._expected}
