# SPDX-License-Identifier: Apache-2.0
"""Weights are updated in place: no engine uses KV of other weights, and none stores any."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.epochs import MOST, next_epoch, write_epoch
from ecshare.store.open import open_store
from ecshare.transfer.upkeep import epochs
from lab.vllm_loop import Row
from tests.kvshare.conftest import StartEngine, is_at_rest, spin
from tests.kvshare.toy import (
    BLOCK,
    Answer,
    ToyEngine,
    ToyModel,
    expected_answer,
    make_request,
    objects,
)
from tests.waiting import wait_until

PROMPT = list(range(100, 100 + 9 * BLOCK + 2))
OLD, NEW = [7], [8]


class TrainedModel(ToyModel):
    """All its KV depends on its weights."""

    weights = OLD

    def flavour(self, row: Row) -> list[int]:
        return self.weights


@pytest.fixture(autouse=True)
def read_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "READ_EVERY_S", 0.05)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def fleet(start: StartEngine, tmp_path: Path, request: pytest.FixtureRequest) -> StartEngine:
    hosts = iter(range(100))

    def fresh() -> ToyEngine:
        store = {"host_cache_dir": f"{tmp_path}/host-{next(hosts)}"}
        return start(model=TrainedModel, is_async=request.param, store=store, num_blocks=96)

    return fresh


@pytest.fixture
def begin_epoch(text_model: Path, tmp_path: Path) -> partial[int]:
    async def begin() -> int:
        store = open_store(StoreConfig(url=f"file://{tmp_path}/store"), "options")
        try:
            return await next_epoch(store, str(text_model), None)
        finally:
            await store.close()

    return partial(lambda: asyncio.run(begin()))


def ask(engine: ToyEngine, prompt: list[int] = PROMPT, name: str = "r") -> Answer:
    """Serve a request; its tokens must be those of the present weights."""
    (answer,) = engine.run(make_request(name, prompt, 6))
    weights = engine.model.flavour(None)  # type: ignore[arg-type]
    assert answer.tokens == expected_answer(prompt, 6, engine.windows, weights)
    return answer


def hear(number: int, *engines: ToyEngine) -> None:
    for engine in engines:
        wait_until(partial(has_read, engine, number), 10)


def has_read(engine: ToyEngine, number: int) -> bool:
    reader = engine.connector.scheduler.engine.epochs._reader
    return reader is not None and reader.number == number


def train(engine: ToyEngine) -> None:
    assert isinstance(engine.model, TrainedModel)
    engine.model.weights = NEW


def update(engine: ToyEngine) -> None:
    train(engine)
    while engine.in_flight:  # vLLM refuses a reset while steps hold blocks
        engine.update()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)


def test_engines_share_in_the_new_epoch_only_what_the_new_weights_computed(
    fleet: StartEngine, begin_epoch: partial[int], tmp_path: Path
) -> None:
    first, second = fleet(), fleet()
    assert ask(first).computed_prompt_tokens == len(PROMPT)
    assert ask(second).computed_prompt_tokens == 1
    hear(begin_epoch(), first, second)
    stored = objects(tmp_path)
    # The weights are still the old ones: neither is KV of them stored as new, nor is it loaded.
    ask(first, PROMPT[1:], "old weights")
    assert objects(tmp_path) == stored
    update(first)
    assert ask(first).computed_prompt_tokens == len(PROMPT)
    assert ask(second, PROMPT[2:], "not updated").computed_prompt_tokens == len(PROMPT) - 2
    update(second)
    assert ask(second).computed_prompt_tokens == 1, "it loads what the first one has computed"
    assert ask(second, PROMPT[1:], "none").computed_prompt_tokens == len(PROMPT) - 1
    newcomer = fleet()
    assert ask(newcomer).computed_prompt_tokens == 1, "it has the weights of its files"
    assert ask(newcomer, PROMPT[3:], "newcomer").computed_prompt_tokens == len(PROMPT) - 3
    update(newcomer)
    assert ask(newcomer).computed_prompt_tokens == 1
    assert ask(second, PROMPT[3:], "its old").computed_prompt_tokens == len(PROMPT) - 3
    assert all(map(is_at_rest, (first, second, newcomer)))


def test_update_under_load_stores_nothing_of_mixed_weights(
    fleet: StartEngine, begin_epoch: partial[int], tmp_path: Path
) -> None:
    """Requests run while the weights change; their KV and their answers are of both weights."""
    engine, prompts = fleet(), [PROMPT[n:] + [n] for n in range(4)]
    for name, prompt in enumerate(prompts):
        engine.add(make_request(f"load-{name}", prompt, 40))
    spin(engine, lambda: bool(objects(tmp_path)), "nothing is saved")
    hear(begin_epoch(), engine)
    engine.step()
    engine.transfer.drain(10)
    stored = objects(tmp_path)
    train(engine)  # and some steps later the reset
    engine.step()
    engine.step()
    update(engine)
    engine.run_out()
    (old,) = {path.parts[-3] for path in stored}
    assert [path for path in objects(tmp_path) if path.parts[-3] == old] == stored
    for number, prompt in enumerate(prompts):
        ask(engine, prompt, f"after-{number}")
    newcomer = fleet()
    update(newcomer)
    for number, prompt in enumerate(prompts):
        assert ask(newcomer, prompt, f"{number}").computed_prompt_tokens == 1
    assert is_at_rest(engine)


def test_prefiller_announces_nothing_that_it_computes_when_an_epoch_begins(
    fleet: StartEngine, begin_epoch: partial[int], tmp_path: Path
) -> None:
    """Decoders would wait for the rest of it."""
    p = fleet()
    (told,) = p.run(make_request("before", PROMPT[1:], 1))
    assert told.kv_transfer_params
    p.add(make_request("middle", PROMPT, 40))
    spin(p, lambda: len(objects(tmp_path)) > len(PROMPT) // BLOCK, "nothing is saved")
    hear(begin_epoch(), p)
    p.run_out()
    assert p.answers["middle"].kv_transfer_params is None


def test_requests_that_wait_during_the_update_are_shared_when_it_ends(
    fleet: StartEngine, begin_epoch: partial[int]
) -> None:
    engine = fleet()
    ask(engine, PROMPT[1:], "warm")
    hear(begin_epoch(), engine)
    update(engine)
    ask(engine)  # at once, before the epoch was read again
    newcomer = fleet()
    update(newcomer)
    assert ask(newcomer).computed_prompt_tokens == 1


def test_reset_without_an_epoch_changes_nothing_that_is_shared(fleet: StartEngine) -> None:
    engine = fleet()
    ask(engine)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert ask(engine, name="again").computed_prompt_tokens == 1


def test_nothing_is_loaded_after_a_reset_until_the_store_answers(
    fleet: StartEngine, tmp_path: Path
) -> None:
    """The weights may have changed, and the store, which is away, may have an epoch."""
    engine = fleet()
    ask(engine)
    half = engine.connector.scheduler.engine.epochs
    half._wait_s = 0.2
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("no folder")
    update(engine)
    assert ask(engine).computed_prompt_tokens == len(PROMPT)
    (tmp_path / "store").unlink()
    (tmp_path / "away").rename(tmp_path / "store")
    wait_until(lambda: half._reader is not None and half._reader.has_answered(1))
    assert ask(engine, PROMPT[1:], "answered").computed_prompt_tokens == len(PROMPT) - 1
    assert half.may_share


def test_engine_that_has_read_an_epoch_goes_back_to_none(
    fleet: StartEngine, begin_epoch: partial[int], tmp_path: Path
) -> None:
    """Somebody removes the epoch, or puts an older one back: those that save write theirs again."""
    engine = fleet()
    ask(engine)
    hear(number := begin_epoch(), engine)
    (path,) = (tmp_path / "store").glob("epochs/1/[!.]*")
    # Not by a second command: the engine may just write the first one's number again, over the
    # second. `ecshare epoch next` notices that within seconds.
    old = path.read_bytes().replace(b"%d" % number, b"%d" % (number - 1))
    update(engine)
    assert ask(engine).computed_prompt_tokens == len(PROMPT)
    engine.transfer.drain(10)
    for damage in (path.unlink, partial(path.write_bytes, old), partial(path.write_bytes, b"x")):
        damage()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert ask(engine).computed_prompt_tokens == 1, "of the same epoch as before"
        wait_until(lambda: path.exists() and str(number) in path.read_text("latin-1"))


def test_engine_that_looks_nothing_up_stores_in_the_new_epoch_what_the_old_one_has(
    start: StartEngine, fleet: StartEngine, begin_epoch: partial[int]
) -> None:
    engine = start("kv_producer", model=TrainedModel)
    ask(engine)
    hear(begin_epoch(), engine)
    update(engine)
    ask(engine)
    newcomer = fleet()
    update(newcomer)
    assert ask(newcomer).computed_prompt_tokens == 1


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_requests_that_are_left_out_leave_nothing_behind(
    start: StartEngine, begin_epoch: partial[int], role: str
) -> None:
    """An engine that is not reset may go on for days."""
    engine = start(role, model=TrainedModel)
    hear(begin_epoch(), engine)
    ask(engine)
    ask(engine, PROMPT[1:], "another")
    assert not engine.connector.scheduler.engine.epochs.left_out


def test_forged_epoch_stops_sharing_and_nothing_else(
    fleet: StartEngine, text_model: Path, tmp_path: Path
) -> None:
    """Without an integrity_key nothing distinguishes it. It ends as others do: with a reset."""
    engine = fleet()
    ask(engine)
    forge(text_model, tmp_path, MOST)
    hear(MOST, engine)
    assert ask(engine, PROMPT[1:], "closed").computed_prompt_tokens == len(PROMPT) - 1
    update(engine)
    assert ask(engine).computed_prompt_tokens == len(PROMPT)
    newcomer = fleet()
    update(newcomer)
    assert ask(newcomer).computed_prompt_tokens == 1


def forge(model: Path, tmp_path: Path, number: int) -> None:
    async def write() -> None:
        store = open_store(StoreConfig(url=f"file://{tmp_path}/store"), "options")
        await write_epoch(store, str(model), number, None)
        await store.close()

    asyncio.run(write())
