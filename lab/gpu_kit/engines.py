# SPDX-License-Identifier: Apache-2.0
"""Checks with real engines, where vLLM is installed: their answers are those of a plain engine.

One check computes in 32 bits, and compares tokens. The others run engines as users do: in bfloat16
and, on a GPU, with CUDA graphs and the model runner that vLLM chooses. Rounding then depends on the
batch, so they compare the log-probabilities of tokens.

tests/engines/test_gpu_kit.py plays the checks with engines on a CPU.
"""

import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Self

import torch

from lab.gpu_kit.kit import Bench, Check, Skipped
from lab.models import FAMILIES, make_qwen2
from lab.servers import openai_client as client
from lab.servers.engines import (
    ON_A_GPU,
    SMALL,
    SMALL_ENGINE,
    EngineProcess,
    ec_argument,
    kv_argument,
)
from lab.servers.openai_client import Answer
from lab.servers.processes import Server

LONG_TOKENS = 16_384
_ANSWER_TOKENS = 128
_AS_USERS = ("--dtype=bfloat16", *SMALL)
MOST_APART = 0.25
"""The largest difference between two log-probabilities of one token. On a CPU, where rounding does
not depend on what is loaded, they are equal. One more letter in the prompt changes them by 0.5,
another picture by 0.9."""
_WITH_LOGPROBS = {"logprobs": True, "top_logprobs": 20, "return_tokens_as_token_ids": True}
_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # without effect on GPUs
_STORY = "Tell me a story about the sea, the wind and the stars, and of an old stone house. "


class Fleet:
    """Engines of one check, with one store. The fleet stops them at its end."""

    def __init__(self, bench: Bench, family: str, *, is_exact: bool = False, **sizes: int) -> None:
        """Make the model of `family` (lab/models). `sizes`: of a Qwen2, instead of the defaults.

        `is_exact`: equal tokens are expected. Else engines are as users run them.
        """
        self._bench = bench
        self._own = [*(SMALL_ENGINE if is_exact else _AS_USERS)]
        self._own += ON_A_GPU if bench.is_gpu else ["--enforce-eager"]  # a CPU compiles for long
        self._own += bench.engine_arguments
        self._root = bench.folder()
        self._stack = ExitStack()
        self._engines: list[EngineProcess] = []
        path = self._root / "model"
        self._model = make_qwen2(path, **sizes) if sizes else FAMILIES[family](path, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(
        self, name: str, *arguments: str, kv: str = "", ec: str = "", ranks: int = 1
    ) -> EngineProcess:
        """Start an engine; call `ready` afterwards. `kv`, `ec`: its roles.

        Each engine has a host cache of its own, so it gets other engines' objects from the store.
        It loads all that it finds, though computing is faster here; other options have defaults.
        """
        own = {"host_cache_dir": str(self._root / f"{name}-host")}
        store = f"file://{self._root}/store"
        given = [*self._own, *arguments]
        given += [kv_argument(kv, store, **own)] if kv else []
        given += [ec_argument(ec, store, **own)] if ec else []
        given += [f"--tensor-parallel-size={ranks}"] if ranks > 1 else []
        environment = _RANKS if ranks > 1 else {}
        return EngineProcess(
            name, self._model, self._root, given, environment, runner_of_vllm=self._bench.is_gpu
        ).start_in(self._stack)

    def ready(self, *engines: EngineProcess) -> None:
        """Wait until all are ready, and note their model runners on a GPU."""
        self._engines = list(engines)
        for engine in engines:
            engine.wait_ready()
            if self._bench.is_gpu:
                self._bench.notes.append(f"{engine.name}: model runner V{1 + engine.runs_v2}")

    def assert_all_was_shared(self) -> None:
        """Raise AssertionError if an engine has failed to save or to load anything.

        vLLM counts tokens whose load has failed as cached, though it computes them.
        """
        for engine in self._engines:
            found = client.counters(engine.base_url)
            events = [
                (name, event)
                for name in ("kvshare_blocks_total", "ecshare_items_total")
                for event in ("failed", "dropped")
            ]
            counts = {event: found[event] for event in events if found.get(event)}
            assert not counts, f"{engine.name}: {counts}"

    def route(self, **stages: Server) -> Server:
        """Start a router before engines by their stage: encoder, prefiller, decoder."""
        router = _Router(stages, self._root).start_in(self._stack)
        router.wait_ready()
        return router


class _Router(Server):
    """A router with default options."""

    def __init__(self, stages: Mapping[str, Server], logs: Path) -> None:
        super().__init__("router", logs)
        self._urls = [f"--{stage}={server.base_url}" for stage, server in stages.items()]

    def command(self) -> Sequence[str]:
        """Return the program and its arguments."""
        port = f"--port={self.port.number}"
        return [sys.executable, "-m", "ecshare.router", port, *self._urls]


def separate_stages_answer_like_one_engine(bench: Bench) -> None:
    """Encode, prefill and decode, behind the router, in 32 bits: the tokens are equal."""
    with Fleet(bench, "qwen2.5-vl", is_exact=True) as fleet:
        for answer, expected in _asked_in_stages(fleet):
            assert answer.token_ids == expected.token_ids


def separate_stages_in_bfloat16_answer_like_one_engine(bench: Bench) -> None:
    """Encode, prefill and decode in bfloat16: the log-probabilities of tokens nearly agree."""
    with Fleet(bench, "qwen2.5-vl") as fleet:
        apart = [_distance(*answers) for answers in _asked_in_stages(fleet)]
    bench.notes.append(f"logarithms of probabilities differ by {max(apart):.3f} at most")
    assert max(apart) <= MOST_APART


def _asked_in_stages(fleet: Fleet) -> Iterator[tuple[Answer, Answer]]:
    """Yield pairs of an answer of the stages and one of a plain engine: each first with nothing
    stored, then with everything stored.
    """
    no_inputs = "--mm-processor-cache-gb=0"
    plain = fleet.start("plain")
    e = fleet.start("e", ec="producer")
    p = fleet.start("p", no_inputs, ec="consumer", kv="both")
    d = fleet.start("d", no_inputs, ec="consumer", kv="both")
    fleet.ready(plain, e, p, d)
    router = fleet.route(encoder=e, prefiller=p, decoder=d)
    for pictures in ([client.picture(1)], [client.picture(1), client.picture(2)], []):
        asked = client.question(_STORY * 8, pictures) | _WITH_LOGPROBS
        expected = client.ask(plain.base_url, asked)
        for turn in range(2):
            num_before = _num_computed(d)
            answer = client.ask(router.base_url, asked)
            yield answer, expected
            if not turn:
                assert answer.path[-2:] == ("prefill", "decode"), answer.path
                assert _num_computed(d) == num_before + 1, "D has computed more than the last token"
    assert client.counters(p.base_url)["ecshare_items_total", "loaded"] >= 2, "P has encoded"
    fleet.assert_all_was_shared()


def engines_of_one_and_two_ranks_share_kv(bench: Bench) -> None:
    """One rank, and two other ranks, load what two ranks have computed."""
    if bench.is_gpu and torch.cuda.device_count() < 2:
        raise Skipped("needs two GPUs")
    with Fleet(bench, "qwen2") as fleet:
        asked = client.question(_STORY * 24) | _WITH_LOGPROBS
        plain = fleet.start("plain")
        fleet.ready(plain)
        expected = client.ask(plain.base_url, asked)
        for number, ranks in enumerate((2, 1, 2)):
            # One after the other: an engine stores what it computed before it stops.
            engine = fleet.start(f"engine-{number}", kv="both", ranks=ranks)
            fleet.ready(engine)
            answer = client.ask(engine.base_url, asked)
            fleet.assert_all_was_shared()
            engine.stop()
            assert _distance(answer, expected) <= MOST_APART, f"{ranks} ranks"
            if number:
                _assert_all_but_one_cached(answer)


def long_prompt_is_handed_over(bench: Bench) -> None:
    """16,384 tokens from P to D: D computes one of them."""
    most_tokens = LONG_TOKENS + 1024
    with Fleet(bench, "qwen2", max_position_embeddings=most_tokens) as fleet:
        longest = f"--max-model-len={most_tokens}"
        plain = fleet.start("plain", longest)
        p = fleet.start("p", longest, kv="both")
        d = fleet.start("d", longest, kv="both")
        fleet.ready(plain, p, d)
        router = fleet.route(prefiller=p, decoder=d)
        once = client.ask(plain.base_url, client.question(_STORY * 10, max_tokens=1)).usage
        per_story = once["prompt_tokens"] / 10
        asked = client.question(_STORY * int(LONG_TOKENS / per_story - 1)) | _WITH_LOGPROBS
        expected = client.ask(plain.base_url, asked)
        began_s = time.perf_counter()
        answer = client.ask(router.base_url, asked)
        took_s = time.perf_counter() - began_s
        assert _distance(answer, expected) <= MOST_APART
        assert _num_computed(d) == 1, "D has computed more than the last token"
        fleet.assert_all_was_shared()
        num_tokens = answer.usage["prompt_tokens"]
        bench.notes.append(f"{num_tokens} tokens: {took_s:.2f} s, by stage {answer.stage_ms} ms")


def token_gaps_during_saves_are_measured(bench: Bench) -> None:
    """Note the gaps between tokens of one answer while other prompts arrive; judge none."""
    with Fleet(bench, "qwen2") as fleet:
        plain, saving = fleet.start("plain"), fleet.start("saving", kv="producer")
        fleet.ready(plain, saving)
        for turn in range(2):  # the first one warms up
            for engine in (plain, saving):
                num_tokens, gaps_s = _answer_beside_prompts(engine, turn)
                assert num_tokens == _ANSWER_TOKENS
                if turn:
                    bench.notes.append(f"{engine.name}: {_in_words(gaps_s)}")
        assert client.counters(saving.base_url)["kvshare_blocks_total", "saved"], "saves nothing"
        fleet.assert_all_was_shared()


def _answer_beside_prompts(engine: Server, turn: int) -> tuple[int, list[float]]:
    """Return the number of tokens of a streamed answer, and the seconds between them."""

    def prefill(number: int) -> None:
        words = f"{turn} {number} {_STORY * 40}"
        client.ask(engine.base_url, client.question(words, max_tokens=1))

    asked = {**client.question(f"{turn} {_STORY}", max_tokens=_ANSWER_TOKENS), "ignore_eos": True}
    num_tokens, times_s = 0, []
    with ThreadPoolExecutor(4) as others:
        for part in client.stream(engine.base_url, asked):
            times_s.append(time.perf_counter())
            num_tokens += len(part["choices"][0].get("token_ids") or ())
            if len(times_s) % 8 == 0:
                others.submit(prefill, len(times_s))
    return num_tokens, [after - before for before, after in pairwise(times_s)]


def _in_words(gaps_s: Sequence[float]) -> str:
    ms = sorted(1e3 * gap_s for gap_s in gaps_s)
    middle, late = statistics.median(ms), ms[int(len(ms) * 0.95)]
    return f"gaps between tokens {middle:.1f} ms, p95 {late:.1f} ms, longest {ms[-1]:.1f} ms"


def _distance(found: Answer, expected: Answer) -> float:
    """Return the largest difference of log-probabilities up to the first token that differs,
    inclusive. Infinite: a token that one chose is not among the likeliest of the other.
    """
    furthest = 0.0
    for number, tokens in enumerate(zip(found.token_ids, expected.token_ids, strict=True)):
        ours, theirs = found.logprobs[number], expected.logprobs[number]
        chosen = {f"token_id:{token}" for token in tokens}
        if not chosen <= ours.keys() & theirs.keys():
            return math.inf
        furthest = max(furthest, *(abs(ours[each] - theirs[each]) for each in chosen))
        if len(chosen) > 1:
            break
    return furthest


def _num_computed(engine: Server) -> float:
    """Return how many tokens of prompts `engine` has computed, by its own metrics.

    The usage in an answer of the router is that of P.
    """
    return client.counters(engine.base_url)["vllm:request_prefill_kv_computed_tokens_sum", ""]


def _assert_all_but_one_cached(answer: Answer) -> None:
    usage = answer.usage
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert num_cached == usage["prompt_tokens"] - 1, usage


CHECKS: tuple[Check, ...] = (
    separate_stages_answer_like_one_engine,
    separate_stages_in_bfloat16_answer_like_one_engine,
    engines_of_one_and_two_ranks_share_kv,
    long_prompt_is_handed_over,
    token_gaps_during_saves_are_measured,
)
