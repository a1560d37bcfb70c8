# SPDX-License-Identifier: Apache-2.0
"""Three engines: a plain one that gives the expected tokens, and two that share KV."""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from lab.servers.engines import EngineProcess, kv_argument
from tests.engines.chat import FOR_DECODE, Answer, ask, counting, counts, picture, text, wait_until
from tests.faults.failing import Failing
from tests.faults.fleet import RECOVERS_WITHIN_S, SHORT_WAITS, Decoding

BLOCK, CHUNK = 32, 96
WORDS = (
    "what is to be seen here, and where? Tell of the sea, the wind and the stars, "
    "and of an old stone house by the road. "
) * 4
NUM_OBJECTS = 3
"""Objects of a prompt: two whole chunks and a tail."""
_MISSES = "kvshare_misses/"
DROPPED = "kvshare_blocks/dropped"
FAILED = "kvshare_blocks/failed"
GIVES_UP_S = 30.0

_numbers = itertools.count()


@dataclass(frozen=True)
class Prompt:
    """A picture among words, in chunks that it shares with no other prompt."""

    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def content(self) -> list[dict[str, Any]]:
        return [text(f"Number {self.number:03d}."), picture(self.number % 5), text(WORDS)]


@dataclass(frozen=True)
class Handed:
    """A prompt that `first` has computed, and the transfer params of its answer."""

    prompt: Prompt
    num_tokens: int
    params: dict[str, Any]


@dataclass
class KVFleet:
    """The engines, and requests to them. Every answer must have the expected tokens."""

    plain: EngineProcess
    first: EngineProcess
    consumer: EngineProcess
    _expected: dict[Prompt, list[int]] = field(default_factory=dict)

    def wait_ready(self) -> Self:
        for engine in (self.plain, self.first, self.consumer):
            engine.wait_ready()
        expected = [tuple(self.expected(Prompt())) for _ in range(5)]
        assert len(set(expected)) == len(expected), "prompts look alike"
        return self

    def expected(self, prompt: Prompt) -> list[int]:
        if prompt not in self._expected:
            answer = ask(self.plain, self.plain.model, prompt.content)
            self._expected[prompt] = answer.tokens
        return self._expected[prompt]

    def prefill(self, prompt: Prompt | None = None) -> Handed:
        """Have `first` compute a prompt: this one, or a new one."""
        prompt = prompt or Prompt()
        answer = self._ask(self.first, prompt, **FOR_DECODE)
        return Handed(prompt, answer.num_prompt_tokens, answer.body["kv_transfer_params"])

    def decode(self, handed: Handed) -> Answer:
        """Have `consumer` decode a prompt that `first` has computed."""
        return self._ask(self.consumer, handed.prompt, kv_transfer_params=handed.params)

    def is_loaded(self, handed: Handed) -> bool:
        """Whether `consumer`, which must not have had the prompt before, loads all of it."""
        with counting(self.consumer) as gained:
            answer = self.decode(handed)
        # vLLM counts announced tokens as cached, even if their load then fails.
        return answer.num_cached_tokens == handed.num_tokens - 1 and not gained[FAILED]

    def _ask(self, engine: EngineProcess, prompt: Prompt, **fields: Any) -> Answer:
        answer = ask(engine, engine.model, prompt.content, **fields)
        assert answer.tokens == self.expected(prompt)
        return answer

    def num_stored(self) -> int:
        """How many KV objects the store has."""
        raise NotImplementedError

    def store(self) -> Handed:
        """Have a new prompt computed, and return when all its KV is stored."""
        before = self.num_stored()
        handed = self.prefill()
        wait_until(lambda: self.num_stored() >= before + NUM_OBJECTS, "it was not stored")
        return handed

    def check_recovers(self, lost: Handed | None = None) -> None:
        """Check that new prompts pass through the store again, and `lost` once it is repeated.

        `consumer` must not have had `lost` before.
        """
        wait_until(
            lambda: self.is_loaded(self.prefill()),
            "nothing passes through the store again",
            RECOVERS_WITHIN_S,
        )
        if lost is not None:
            assert self.is_loaded(self.prefill(lost.prompt)), "what was lost is not stored again"

    def survive(
        self, failing: Failing, *, reads: bool = False, writes: bool | None = False
    ) -> None:
        """Send all kinds of requests during a fault. `reads`, `writes`: do those still work?"""
        kept, unread = self.store(), self.store()
        dropped = self._num_dropped()
        with self.counting_failures(reads=reads, writes=writes), Decoding(self):
            with failing():
                lost, met = self.prefill(), self.prefill()
                assert self.is_loaded(kept) is reads
                self.decode(met)
                self.decode(unread)
                self.prefill(kept.prompt)
                if writes is False:
                    wait_until(lambda: self._num_dropped() > dropped, "all is stored", GIVES_UP_S)
            self.decode(self.prefill())
            self.check_recovers(lost)

    def _num_dropped(self) -> float:
        """The count of `first`, after a request: it publishes counters only with engine steps."""
        self.prefill()
        return counts(self.first).get(DROPPED, 0)

    @contextmanager
    def counting_failures(self, *, reads: bool, writes: bool | None = None) -> Iterator[None]:
        """Check that failed reads count as misses, failed writes as dropped blocks; None: any."""
        with counting(self.consumer) as read, counting(self.first) as written:
            yield
        assert reads or num_misses(read) > 0
        assert writes in (None, not written[DROPPED])


def num_misses(gained: Counter[str]) -> int:
    """Return the number of misses among what an engine counted, for any reason."""
    return sum(number for name, number in gained.items() if name.startswith(_MISSES))


def sharing(url: str, host: str, **options: Any) -> tuple[str, ...]:
    """The arguments of an engine that shares KV."""
    options = SHORT_WAITS | options
    kv = kv_argument("both", url, host_cache_dir=host, chunk_tokens=CHUNK, **options)
    return f"--block-size={BLOCK}", kv
