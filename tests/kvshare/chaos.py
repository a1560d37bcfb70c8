# SPDX-License-Identifier: Apache-2.0
"""Engines that share one store under random requests and faults.

A play has some players: engines with vLLM's real scheduler, both halves of the connector and the
arithmetic of `toy` for a model. A random generator chooses requests and faults. Threads are not
synchronised: a seed gives the same engines and the same events, but not the same interleaving.
"""

import asyncio
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from vllm.v1.request import Request

from ecshare.store.errors import StoreBusy
from ecshare.store.keys import Key
from ecshare.store.objects import Buffer, ObjectStore, Sink
from ecshare.store.open import open_store
from tests.kvshare.damage import flip_a_payload_bit
from tests.kvshare.test_life import SPECULATING, GuessingModel
from tests.kvshare.toy import (
    BLOCK,
    GIVE_UP_S,
    ToyEngine,
    expected_answer,
    hybrid,
    make_request,
    objects,
    options,
    spec,
    vllm_config,
    window,
)
from tests.sibling import from_prefiller
from tests.waiting import wait_until

KINDS = ("full", "windows", "guesses", "siblings", "hybrids")
NUM_TURNS = 500
EVENTS = (
    *("answers", "aborts", "preemptions", "announced", "streamed", "never stored", "resets"),
    *("sleeps", "failed operations", "evictions", "damages", "loaded", "computed at once"),
)
"""Events that any few plays together must contain."""
BESIDE_SIBLINGS = ("taken by a sibling", "wrong beside a sibling")
"""Further events of the kind `siblings`."""
MOST_LIVE = 10
MOST_PROMPT_TOKENS = 60
MOST_ANSWER_TOKENS = 24
FEWEST_BLOCKS = -(-(MOST_PROMPT_TOKENS + MOST_ANSWER_TOKENS) // BLOCK) + 2
LONGEST_DELAY_S = 0.03
GARBAGE = -7.0


@dataclass(frozen=True)
class EngineOptions:
    """The options of one engine of a play."""

    store: dict[str, Any]
    """Options of the connector."""
    config: dict[str, Any] = field(default_factory=dict)
    """Arguments of `vllm_config`."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of `ToyEngine`."""


def drawn(dice: Random, kind: str, folder: Path, num_engines: int = 2) -> list[EngineOptions]:
    """Draw the options of engines that share a namespace. The first is always short of blocks.

    For the kind `siblings` the first also has another connector, which loads wrong KV.
    """
    shared: dict[str, Any] = {"chunk_tokens": dice.choice([BLOCK, 2 * BLOCK, 4 * BLOCK])}
    shared |= {"wait_s": 0.4, "io_timeout_s": 1.0}
    if dice.random() < 0.3:
        shared["compression"] = "zstd"
    engine: dict[str, Any] = {}
    if kind == "windows":
        engine["specs"] = (spec(), window(dice.choice([5, 8, 12])))
    if kind == "hybrids":
        engine["specs"] = hybrid(dice.choice([1, 2, 3]))
    return [_drawn_one(dice, kind, number, folder, shared, engine) for number in range(num_engines)]


def _drawn_one(
    dice: Random, kind: str, number: int, folder: Path, shared: dict[str, Any], engine: Any
) -> EngineOptions:
    store = options(folder, **shared, host_cache_bytes=dice.choice([60_000, 400_000, 4_000_000]))
    store["load"] = dice.choice(["always", "always", "if_faster"])
    if dice.random() < 0.5:
        store["host_cache_dir"] = f"{folder}/host-{number}"
    if dice.random() < 0.4:
        store["buffer_bytes"] = dice.choice([40_000, 120_000])
    config: dict[str, Any] = {
        "max_num_batched_tokens": dice.choice([24, 60, 2048]),
        "max_num_seqs": 8,
    }
    if kind == "hybrids" and dice.random() < 0.3:
        store["save_after"] = dice.choice([2, 3])
    num_blocks = FEWEST_BLOCKS + (dice.choice([0, 16, 60]) if number else 0)
    if kind == "hybrids":
        num_blocks += 4 * len(engine["specs"])
    elif "specs" in engine:  # a window's blocks are freed only once the prompt is computed
        num_blocks += MOST_PROMPT_TOKENS // BLOCK + 1
    own: dict[str, Any] = {"num_blocks": num_blocks}
    if kind == "siblings" and not number:
        config["sibling"] = {
            "is_async": dice.random() < 0.5,
            "is_behind": dice.random() < 0.5,
            "brings": dice.choice(["named", "named", "always"]),
        }
    if kind == "guesses":
        config |= SPECULATING
        own |= {"model": GuessingModel}
    else:
        own |= {"is_async": dice.random() < 0.7, "runner": dice.choice(["v1", "v2"])}
    return EngineOptions(store, config, engine | own)


class Weather:
    """Delays and failures of a store's operations. Thread-safe."""

    def __init__(self, dice: Random) -> None:
        self.failing = 0.0
        """The share of operations that fail."""
        self.num_failed = 0
        self._dice = dice

    @contextmanager
    def above(self) -> Iterator[None]:
        """Subject stores that are opened inside the context to this weather."""

        def opened(*args: Any, **kwargs: Any) -> Any:
            return _InWeather(open_store(*args, **kwargs), self)

        with patch("ecshare.transfer.engine.open_store", opened):
            yield

    async def befalls(self) -> None:
        """Wait for a random time, or fail."""
        chance = self._dice.random()
        if chance < max(0.3, self.failing):
            await asyncio.sleep(self._dice.random() * LONGEST_DELAY_S)
        if chance < self.failing:
            self.num_failed += 1
            raise StoreBusy("played")


class _InWeather:
    """A store whose operations are delayed or fail."""

    def __init__(self, store: ObjectStore, weather: Weather) -> None:
        self._store = store
        self._weather = weather

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get(self, key: Key, sink: Sink) -> None:
        await self._weather.befalls()
        await self._store.get(key, sink)

    async def put(self, key: Key, body: Buffer, *, replace: bool = False) -> bool:
        await self._weather.befalls()
        return await self._store.put(key, body, replace=replace)

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        await self._weather.befalls()
        return await self._store.exists(keys)


class Player:
    """One engine of a play, and the requests that it has not answered yet."""

    def __init__(self, model: Path, own: EngineOptions, dice: Random, seen: Counter[str]) -> None:
        """`seen`: counts what happens."""
        config = vllm_config(model, own.store, **own.config)
        self.engine = ToyEngine(config, **own.engine)
        self.live: dict[str, Request] = {}
        self.is_asleep = False
        self.is_async = bool(own.engine.get("is_async"))
        self.sibling: dict[str, Any] | None = own.config.get("sibling")
        self._dice = dice
        self._seen = seen
        self._num_asked = 0

    def ask(self, words: Sequence[int], salt: str | None, params: Any = None) -> str:
        """Ask for an answer to `words`; return the request's name."""
        name = f"r{self._num_asked}"
        self._num_asked += 1
        num_tokens = self._dice.randrange(1, MOST_ANSWER_TOKENS)
        more = {"cache_salt": salt, "kv_transfer_params": params}
        request = self.live[name] = make_request(name, words, num_tokens, **more)
        self.engine.add(request)
        return name

    def abort(self) -> None:
        """End a request as if its client had left."""
        if self.live:
            name = self._dice.choice(list(self.live))
            self._check(self.live.pop(name))
            self.engine.abort(name)
            self._seen["aborts"] += 1

    def reset(self) -> None:
        """Reset vLLM's prefix cache, with or without running requests; loads make it refuse."""
        self._seen["resets"] += self._is_reset(and_running=self._dice.random() < 0.7)

    def sleep_or_wake(self) -> None:
        """Fall asleep, or wake up. vLLM resets its cache before it sleeps, if it can."""
        connector = self.engine._worker_connector
        if self.is_asleep:
            connector.restore_kv_caches()
        else:
            self.engine.update_all()
            is_empty = self._is_reset(and_running=True)
            connector.unregister_kv_caches()
            if is_empty:
                for layer in self.engine.model.kv_caches.values():
                    layer.fill_(GARBAGE)
            self._seen["sleeps"] += 1
        self.is_asleep = not self.is_asleep

    def step(self) -> None:
        """Run one step of the engine, if it has work; check the answers that end."""
        if self.is_asleep or not self.engine.has_work:
            return
        before = {name: each.num_preemptions for name, each in self.live.items()}
        self.engine.step()
        for name, request in list(self.live.items()):
            self._seen["preemptions"] += request.num_preemptions > before[name]
            if self.engine.answers[name].finish_reason is not None:
                answer = self._check(self.live.pop(name))
                assert len(answer) == request.max_tokens, name
                self._seen["answers"] += 1

    def come_to_rest(self) -> None:
        """Serve the remaining requests; check that all ended and that no resource is held."""
        if self.is_asleep:
            self.sleep_or_wake()
        deadline_s = time.monotonic() + GIVE_UP_S
        while self.engine.has_work:
            self.step()
            assert time.monotonic() < deadline_s, f"the engine hangs: {self}"
        assert not self.live, f"never answered: {self}"
        worker, scheduler = self.engine.worker, self.engine.connector.scheduler
        wait_until(self._has_settled, otherwise=f"a transfer hangs: {self}")
        assert worker.is_empty, f"a load or save is left: {self}"
        assert scheduler.is_empty, f"the scheduler half holds something: {self}"
        assert not self.engine.scheduler.kv_cache_manager.block_pool.get_usage(), str(self)
        # A put that was given up may read its slab a little longer.
        wait_until(lambda: not worker.save_queue_bytes, otherwise="a slab is left")
        self.engine.run(make_request("last", [1]))  # its steps report the ended transfers
        assert not scheduler.reserved_bytes, "memory is reserved"
        for guard in (self.engine.connector.guard, self.engine._worker_connector.guard):
            assert not guard.has_given_up, "a hook raised"
        self._seen["loaded"] += int(self.engine.counts.get("tokens/loaded", 0))

    def __str__(self) -> str:
        requests = self.engine.scheduler.requests.values()
        left = [
            (each.request_id, each.status.name, each.num_tokens, each.num_computed_tokens)
            for each in requests
        ]
        loads, pool = self.engine.worker._loads, self.engine.scheduler.kv_cache_manager.block_pool
        free = f"{pool.get_num_free_blocks()} blocks are free of {pool.num_gpu_blocks}"
        scheduler = self.engine.connector.scheduler
        ours = (
            f"tracked {list(scheduler._tracked)}, loading {list(scheduler._loads._loading)}, "
            f"leaving {len(scheduler._saves._leaving)}, loads {list(loads._loads) if loads else 0}"
        )
        return f"{left}, {free}, {ours}"

    def _has_settled(self) -> bool:
        self.engine.worker.settle()
        return not self.engine.transfer.in_flight

    def _is_reset(self, *, and_running: bool) -> bool:
        try:
            return self.engine.scheduler.reset_prefix_cache(and_running, and_running)
        except RuntimeError:
            return False

    def _check(self, request: Request) -> list[int]:
        """Return the answer so far, and check it. Beside a sibling it may be wrong: the sibling's
        wrong KV may be a local hit of any request."""
        tokens = self.engine.answers[request.request_id].tokens
        prompt = request.prompt_token_ids
        assert prompt is not None
        right = expected_answer(prompt, len(tokens), self.engine.windows)
        if self.sibling is None:
            assert tokens == right, f"wrong tokens: {request.request_id}, {self}"
        self._seen["wrong beside a sibling"] += tokens != right
        return tokens


class Play:
    """Some players over one store, and random events. Close it."""

    def __init__(self, model: Path, folder: Path, dice: Random, kind: str) -> None:
        """`model`: of `write_model`. `folder`: empty, for this play."""
        self.seen: Counter[str] = Counter()
        self._dice = dice
        self._folder = folder
        self._weather = Weather(dice)
        with self._weather.above():
            self.players = [
                Player(model, own, dice, self.seen) for own in drawn(dice, kind, folder)
            ]
        self._prompts = [self._words(dice.randrange(2, MOST_PROMPT_TOKENS)) for _ in range(6)]
        self._events: dict[Callable[[Player], None], float] = {
            Player.step: 80,
            self._ask: 11,
            Player.abort: 2,
            Player.reset: 2,
            Player.sleep_or_wake: 1.5,
            self._change_weather: 1.5,
            self._evict: 1,
            self._damage: 1,
        }

    def run(self, num_turns: int = NUM_TURNS) -> Counter[str]:
        """Play, and return how often each event happened.

        Raises:
            AssertionError: an engine answered wrongly, hangs, or keeps what it should not.
        """
        events = self._dice.choices(list(self._events), [*self._events.values()], k=num_turns)
        for event in events:
            event(self._dice.choice(self.players))
        self._weather.failing = 0.0
        for player in self.players:
            player.come_to_rest()
        wait_until(lambda: not self._pinned(), otherwise="an entry of a host cache is pinned")
        self.seen["failed operations"] += self._weather.num_failed
        return self.seen

    def close(self) -> None:
        for player in self.players:
            player.engine.close()
        shutil.rmtree(self._folder)

    def _ask(self, player: Player) -> None:
        """Ask for a known prompt, a part of it or a variation, sometimes as the router asks P and
        D."""
        if len(player.live) >= MOST_LIVE:
            return
        dice = self._dice
        words = dice.choice(self._prompts)
        if dice.random() < 0.5:
            words = [*words[: dice.randrange(1, len(words) + 1)], *self._words(dice.randrange(6))]
            words = words[:MOST_PROMPT_TOKENS]
        salt = dice.choice([None, None, "a tenant's"])
        way = dice.random()
        if player.sibling is not None and dice.random() < 0.3:
            self._ask_sibling(player, words, salt)
        elif way < 0.3:
            self._ask_both(player, words, salt)
        elif way < 0.4:
            player.ask(words, salt, {"kvshare": {"num_tokens": len(words) - 1}})
            self.seen["never stored"] += 1
        else:
            player.ask(words, salt)
            self.seen["computed at once"] += 1

    def _ask_sibling(self, player: Player, words: list[int], salt: str | None) -> None:
        """Ask for a prompt whose KV the sibling loads, or fails to load."""
        assert player.sibling is not None
        failures = ["", ""]
        if player.sibling["is_async"]:
            failures += ["blocks", "request"]
        elif not player.is_async:
            # vLLM 0.32 may keep an asynchronous engine waiting for ever after a synchronous load
            # failed, also without our connector: it skips the output of that step, and still counts
            # its token as one that comes.
            failures.append("blocks")
        said = from_prefiller(
            tokens=self._dice.randrange(len(words)), fails=self._dice.choice(failures)
        )
        player.ask(words, salt, {"kvshare": {}, **said})
        self.seen["taken by a sibling"] += 1

    def _ask_both(self, p: Player, words: list[int], salt: str | None) -> None:
        """Ask P, and ask D while P computes or with P's announcement."""
        p.ask(words, salt, {"do_remote_decode": True})
        d = self._dice.choice([each for each in self.players if each is not p])
        if self._dice.random() < 0.5:
            d.ask(words, salt, {"kvshare": {"streamed": True}})
            self.seen["streamed"] += 1
            return
        said = [each.kv_transfer_params for each in p.engine.answers.values()]
        known = [each for each in said if each]
        if known:
            d.ask(words, salt, self._dice.choice(known))
            self.seen["announced"] += 1

    def _words(self, count: int) -> list[int]:
        """Draw from a small vocabulary, so that prompts share prefixes."""
        return [self._dice.randrange(6) for _ in range(count)]

    def _change_weather(self, player: Player) -> None:
        self._weather.failing = self._dice.choice([0.0, 0.0, 0.1, 0.9])

    def _evict(self, player: Player) -> None:
        """Remove entries, as other users of the same host cache folder do."""
        for path in self._folder.glob("host*/*+*"):
            if self._dice.random() < 0.5:
                path.unlink(missing_ok=True)
                self.seen["evictions"] += 1

    def _damage(self, player: Player) -> None:
        if found := objects(self._folder):
            with suppress(FileNotFoundError):  # an engine has removed it meanwhile
                flip_a_payload_bit(self._dice.choice(found))
                self.seen["damages"] += 1

    def _pinned(self) -> list[str]:
        """Return the entries of host caches that this process has open or mapped."""
        opened = []
        for link in Path("/proc/self/fd").iterdir():
            try:
                opened.append(os.readlink(link))
            except OSError:  # closed meanwhile
                continue
        opened += Path("/proc/self/maps").read_text().splitlines()
        return [each for each in opened if f"{self._folder}/host" in each and "+" in each]
