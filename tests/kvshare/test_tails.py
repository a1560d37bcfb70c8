# SPDX-License-Identifier: Apache-2.0
"""Whole engines with a toy model: which prompts' last, partly filled blocks are shared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kvshare.conftest import StartEngine
from tests.kvshare.toy import BLOCK, ToyEngine, make_request, objects

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
@pytest.mark.parametrize("num_tokens", [BLOCK, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1])
def test_announcement_excludes_unshared_tails_and_d_does_not_wait(
    on_host: OnHosts, tails: str, num_tokens: int
) -> None:
    prompt = PROMPT[:num_tokens]
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
