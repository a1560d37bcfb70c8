# SPDX-License-Identifier: Apache-2.0
"""Whole engines with a toy model: which prompts' last, partly filled blocks are shared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kvshare.conftest import StartEngine
from tests.kvshare.toy import (
    BLOCK,
    FOR_DECODE,
    ToyEngine,
    expected_answer,
    make_request,
    objects,
)

KNOWN = list(range(11, 11 + 2 * BLOCK))
SECRET = 347
END = [99, 7]
PROMPT = [*KNOWN, SECRET, *END]
FULL = len(PROMPT) // BLOCK * BLOCK

OnHosts = Callable[[str], ToyEngine]


@pytest.fixture
def on_host(start: StartEngine, tmp_path: Path) -> OnHosts:
    """Start engines with separate host caches, as on separate hosts."""
    hosts = iter(range(100))

    def start_on_host(tails: str) -> ToyEngine:
        host = {"host_cache_dir": f"{tmp_path}/host-{next(hosts)}"}
        return start(store=host | {"chunk_tokens": 2 * BLOCK, "wait_s": 25.0, "tails": tails})

    return start_on_host


def computed(engine: ToyEngine, prompt: list[int], name: str = "r", **more: Any) -> int:
    (answer,) = engine.run(make_request(name, prompt, **more))
    return answer.computed_prompt_tokens


def guessed(engine: ToyEngine, cache_salt: str | None) -> bool:
    """Return whether trying values of the secret word reveals it."""
    computed(
        engine, [*KNOWN, 1, *END], "first", cache_salt=cache_salt
    )  # the known part is in the local cache now
    by_guess = {
        guess: computed(engine, [*KNOWN, guess, *END], f"guess-{guess}", cache_salt=cache_salt)
        for guess in range(SECRET - 10, SECRET + 10)
    }
    return len(set(by_guess.values())) > 1


@pytest.mark.parametrize(
    ("tails", "salt_of_victim", "salt_of_guesser", "is_guessed"),
    [
        ("always", None, None, True),
        ("always", "victim", "other", False),
        ("always", "victim", None, False),
        ("salted", None, None, False),
        ("salted", None, "other", False),
        ("salted", "victim", "other", False),
        ("salted", "victim", "victim", True),
        ("never", None, None, False),
        ("never", "victim", "victim", False),
    ],
)
def test_prompt_end_can_be_probed_only_if_its_tail_is_shared(
    on_host: OnHosts,
    tails: str,
    salt_of_victim: str | None,
    salt_of_guesser: str | None,
    is_guessed: bool,
) -> None:
    computed(on_host(tails), PROMPT, cache_salt=salt_of_victim)
    assert guessed(on_host(tails), salt_of_guesser) is is_guessed


@pytest.mark.parametrize(
    ("tails", "salt", "num_objects"),
    [("always", None, 2), ("salted", None, 1), ("salted", "a", 2), ("never", "a", 1)],
)
def test_tail_is_stored_as_the_option_and_the_salt_say(
    on_host: OnHosts, tmp_path: Path, tails: str, salt: str | None, num_objects: int
) -> None:
    computed(on_host(tails), PROMPT, cache_salt=salt)
    assert len(objects(tmp_path)) == num_objects


@pytest.mark.parametrize("tails", ["salted", "never"])
def test_engine_that_stores_no_tails_loads_none(on_host: OnHosts, tails: str) -> None:
    computed(on_host("always"), PROMPT)
    assert computed(on_host(tails), PROMPT) == len(PROMPT) - FULL


@pytest.mark.parametrize("tails", ["salted", "never"])
@pytest.mark.parametrize(
    "num_tokens", [BLOCK, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1, 4 * BLOCK - 1]
)
def test_announcement_excludes_unshared_tails_and_d_does_not_wait(
    on_host: OnHosts, tails: str, num_tokens: int
) -> None:
    prompt = [*PROMPT, *range(50, 60)][:num_tokens]
    stored = min(num_tokens // BLOCK * BLOCK, num_tokens - 1)
    (answer,) = on_host(tails).run(make_request("p", prompt))
    told = answer.kv_transfer_params
    assert told is not None
    assert told["kvshare"]["num_tokens"] == stored
    for params in (told, {"kvshare": {"streamed": True}}):
        for reader in (tails, "always"):
            if reader == "always" and params is not told:
                continue  # what is streamed is all of it: the option is to be the same everywhere
            d = on_host(reader)
            assert computed(d, prompt, kv_transfer_params=params) == num_tokens - stored
            assert not [name for name in d.counts if name.startswith("misses/")]


# --- the end of a prompt ---

LONG = list(range(100, 100 + 6 * BLOCK + 3))
WHOLE = 4 * BLOCK


@pytest.fixture
def one_of_two(start: StartEngine, tmp_path: Path) -> OnHosts:
    """Start engines of any role on separate hosts, with chunks of `WHOLE` tokens."""
    hosts = iter(range(100))

    def start_on_host(role: str) -> ToyEngine:
        host = {"host_cache_dir": f"{tmp_path}/host-{next(hosts)}"}
        return start(role, store=host | {"chunk_tokens": WHOLE, "wait_s": 25.0})

    return start_on_host


def hand_over(p: ToyEngine, d: ToyEngine, num_answered: int) -> list[int]:
    """Have P compute LONG and D answer; return the answer."""
    (told,) = p.run(make_request("p", LONG, kv_transfer_params=FOR_DECODE))
    assert told.kv_transfer_params is not None
    request = make_request("d", LONG, num_answered, kv_transfer_params=told.kv_transfer_params)
    (answer,) = d.run(request)
    assert answer.computed_prompt_tokens == 1
    assert answer.tokens == expected_answer(LONG, num_answered)
    return answer.tokens


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_end_of_a_prompt_is_stored_and_loaded_as_one_object(
    one_of_two: OnHosts, tmp_path: Path, role: str
) -> None:
    p, d = one_of_two(role), one_of_two("kv_consumer")
    hand_over(p, d, num_answered=1)
    assert len(objects(tmp_path)) == 2, "a whole chunk and the tail"
    assert p.counts["blocks/saved"] == d.counts["blocks/loaded"] == 7
    assert d.counts["tokens/loaded"] == len(LONG) - 1


@pytest.mark.parametrize(
    ("role", "num_answered", "num_loaded"),
    [
        ("kv_both", 1, WHOLE),  # no KV of an answer is computed
        ("kv_both", 2, 6 * BLOCK + BLOCK),  # of an answer that fills a block
        ("kv_both", 7, 8 * BLOCK),
        ("kv_consumer", 7, WHOLE),  # nobody stores the answer
    ],
)
def test_next_turn_loads_what_the_engine_that_answers_has_stored(
    one_of_two: OnHosts, role: str, num_answered: int, num_loaded: int
) -> None:
    tokens = hand_over(one_of_two("kv_both"), one_of_two(role), num_answered)
    turn = [*LONG, *tokens, *range(40, 47)]
    assert computed(one_of_two("kv_both"), turn) == len(turn) - num_loaded


def test_nothing_is_stored_after_an_answer_that_fills_no_block(
    one_of_two: OnHosts, tmp_path: Path
) -> None:
    prompt = LONG[: 6 * BLOCK + 2]  # the answer's KV is one token of three
    d = one_of_two("kv_both")
    (answer,) = d.run(make_request("d", prompt, 2))
    assert len(objects(tmp_path)) == 2, "a whole chunk and the tail"
    turn = [*prompt, *answer.tokens, *range(40, 47)]
    assert computed(one_of_two("kv_both"), turn) == len(turn) - WHOLE


def test_local_hit_inside_a_tail_is_not_loaded_again(one_of_two: OnHosts) -> None:
    hand_over(one_of_two("kv_both"), one_of_two("kv_both"), num_answered=1)
    engine = one_of_two("kv_both")
    computed(engine, LONG[: 5 * BLOCK + 1], "shorter")
    engine.counts.clear()
    assert computed(engine, LONG, "all") == 1
    assert engine.counts["blocks/loaded"] == 2, "of the three blocks of the tail"
