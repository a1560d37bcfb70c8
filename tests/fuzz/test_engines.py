# SPDX-License-Identifier: Apache-2.0
"""Engines with a toy model, malformed transfer params, and a store whose objects get damaged all
the time: every answer has the right tokens."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from ecshare.store.format import PROLOGUE_BYTES
from tests.fuzz.running import cases, dice
from tests.fuzz.values import ODD_NUMBERS, ODD_TEXT
from tests.kvshare.toy import (
    ToyEngine,
    expected_answer,
    make_request,
    objects,
    options,
    vllm_config,
    write_model,
)

pytestmark = pytest.mark.fuzz

HUGE = 1 << 30
NUM_WORDS = 5  # few, so that prompts share prefixes


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[ToyEngine]]:
    """Engines on two hosts with small caches and a common store."""
    model, started = write_model(tmp_path / "model"), []
    for number in range(2):
        ours = options(tmp_path, wait_s=0.05, io_timeout_s=2.0, chunk_tokens=8)
        ours |= {"host_cache_dir": f"{tmp_path}/host-{number}", "host_cache_bytes": 300_000}
        started.append(ToyEngine(vllm_config(model, ours), is_async=bool(number)))
    yield started
    for engine in started:
        engine.close()


def params(chance: Random) -> dict[str, object]:
    """Transfer params that a client may send."""
    odd: list[object] = [*ODD_NUMBERS, *ODD_TEXT, None, True, False, [], {}]
    names = chance.sample(["num_tokens", "streamed", "size", "x"], chance.randrange(4))
    ours = {name: chance.choice([True, 3, 9, 40, *chance.sample(odd, 3)]) for name in names}
    said: dict[str, object] = {"kvshare": ours if chance.random() < 0.8 else chance.choice(odd)}
    if chance.random() < 0.3:
        said[chance.choice(["do_remote_prefill", "do_remote_decode", "remote_host"])] = True
    return said


def prompt(chance: Random, known: list[list[int]]) -> list[int]:
    words = list(chance.choice(known))
    if chance.random() < 0.3:
        words = words[: chance.randrange(1, len(words) + 1)]
        words += [chance.randrange(NUM_WORDS) for _ in range(chance.randrange(8))]
    return words


def damage(path: Path, others: list[Path], chance: Random) -> None:
    """Replace a stored object, as a new file: host caches may have linked the old one."""
    body = path.read_bytes()
    path.unlink()
    match chance.randrange(13):
        case 0:
            path.write_bytes(body[: chance.randrange(len(body) or 1)])
        case 1 | 9 | 10 | 11 | 12:
            at = PROLOGUE_BYTES + chance.randrange(100)
            path.write_bytes(body[:at] + b"?" + body[at + 1 :])
        case 2:
            path.write_bytes(chance.choice(others).read_bytes())
        case 3:
            path.mkdir()
        case 4:
            os.mkfifo(path)
        case 5:
            targets = ["/dev/zero", "/dev/null", "/etc/passwd", str(path), "/nowhere"]
            path.symlink_to(chance.choice(targets))
        case 6:
            path.write_bytes(body + b"x")
        case 7:
            with path.open("wb") as file:
                file.truncate(HUGE)


def forget(host: Path) -> None:
    """Delete all entries of a host's cache, as if they had been evicted."""
    for path in host.glob("*+*"):
        path.unlink()


def damage_some(folder: Path, chance: Random) -> int:
    found = [path for path in objects(folder) if not path.is_symlink()]
    small = [path for path in found if path.stat().st_size < HUGE]
    chosen = chance.sample(small, chance.randrange(1 + len(small) // 2))
    others = [path for path in small if path not in chosen]
    for path in chosen:
        damage(path, others or [Path("/dev/null")], chance)
    return len(chosen)


def test_damaged_store_and_odd_params_give_right_tokens(
    engines: list[ToyEngine], tmp_path: Path
) -> None:
    chance, seen = dice("engines"), Counter[str]()
    known = [
        [chance.randrange(NUM_WORDS) for _ in range(chance.randrange(1, 60))] for _ in range(8)
    ]
    for number in range(cases(40)):
        engine = chance.choice(engines)
        requests = [
            make_request(
                f"{number}-{n}",
                prompt(chance, known),
                chance.randrange(1, 6),
                kv_transfer_params=params(chance),
                cache_salt=chance.choice([None, None, "one", "two"]),
            )
            for n in range(chance.choice([1, 1, 2, 4]))
        ]
        for request, answer in zip(requests, engine.run(*requests), strict=True):
            words = list(request.prompt_token_ids or ())
            right = expected_answer(words, request.max_tokens, engine.windows)
            assert answer.tokens == right, (words, request.kv_transfer_params)
            seen["loaded"] += answer.computed_prompt_tokens < len(words)
        if chance.random() < 0.5:
            seen["damaged"] += damage_some(tmp_path, chance)
            for host in tmp_path.glob("host-*"):
                forget(host)
    assert seen["loaded"]
    assert seen["damaged"]
