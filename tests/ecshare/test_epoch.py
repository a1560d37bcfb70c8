# SPDX-License-Identifier: Apache-2.0
"""`ecshare epoch`: which models it takes, and what it refuses."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from ecshare.store.epochs import READ_EVERY_S
from ecshare.store.keys import Kind, namespace_digest
from tests.ecshare.conftest import start
from tests.ecshare.test_store_commands import LLAVA, QWEN, SECRET, Command, lines


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    from ecshare.cli import main

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["epoch", *arguments])
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run


@pytest.fixture
def store(tmp_path: Path) -> str:
    start(tmp_path, QWEN)
    start(tmp_path, QWEN, kind=Kind.KV)
    return f"{tmp_path}/store"


def epochs(run: Command, store: str) -> dict[str, int]:
    return {each["model"]: each["epoch"] for each in lines(run("show", store, "--json")[1])}


def test_epoch_of_the_only_model_is_begun_and_shown(store: str, run: Command) -> None:
    assert epochs(run, store) == {QWEN["model"]: 0}
    status, printed, _ = run("next", store, "--no-wait")
    assert status == 0
    number = epochs(run, store)[QWEN["model"]]
    assert f"{QWEN['model']}: epoch {number}." in printed
    assert str(number) in run("show", store)[1]
    assert lines(run("next", store, "--no-wait", "--json")[1])[0]["epoch"] > number


def test_one_of_several_models_has_to_be_named(store: str, tmp_path: Path, run: Command) -> None:
    start(tmp_path, LLAVA)
    status, _, said = run("next", store, "--no-wait")
    assert status == 2
    assert "--model" in said
    assert "llava" in said
    assert run("next", store, "--no-wait", "--model", "llava")[0] == 0
    first = epochs(run, store)
    assert run("next", store, "--no-wait", "--namespace", namespace_digest(LLAVA))[0] == 0
    second = epochs(run, store)
    assert second["llava"] > first["llava"] > 0
    assert first[QWEN["model"]] == second[QWEN["model"]] == 0


def test_names_from_the_bucket_are_escaped(store: str, tmp_path: Path, run: Command) -> None:
    start(tmp_path, {**QWEN, "model": "evil\x1b[2J\n\u202e"})
    for command in (["show"], ["next", "--no-wait"], ["next", "--no-wait", "--model", "evil*"]):
        _, printed, said = run(*command[:1], store, *command[1:])
        assert not {"\x1b", "\u202e"} & set(printed + said)


def test_model_that_no_engine_has_is_refused(store: str, run: Command) -> None:
    """Or a typing error would leave engines with old KV."""
    status, _, said = run("next", store, "--no-wait", "--model", "Qwen/Qwen2.5")
    assert status == 2
    assert QWEN["model"] in said


def test_engines_with_a_key_need_the_key(tmp_path: Path, run: Command) -> None:
    start(tmp_path, {**QWEN, "integrity": "team"})
    store = f"{tmp_path}/store"
    status, _, said = run("next", store, "--no-wait")
    assert status == 2
    assert "integrity_key" in said
    options = json.dumps({"url": store, "integrity_key": SECRET, "integrity_name": "team"})
    assert run("next", options, "--no-wait")[0] == 0
    assert epochs(run, options)[QWEN["model"]] > 0


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have the command wait for engines no longer than a test can; return how long it would."""
    pauses, sleep = [], asyncio.sleep

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0.05)

    monkeypatch.setattr("ecshare.commands.epoch.asyncio.sleep", pause)
    return pauses


def test_it_waits_until_engines_have_read_it(store: str, run: Command, pauses: list[float]) -> None:
    assert run("next", store)[0] == 0
    (pause,) = pauses
    assert pause > READ_EVERY_S


def test_epoch_that_an_older_one_replaces_is_written_again(
    store: str, run: Command, pauses: list[float]
) -> None:
    """As an engine may do that renews what it has read."""
    run("next", store, "--no-wait")
    (path,) = Path(store).glob("epochs/1/*")
    old = path.read_bytes()
    with Replacing(path, old, num_times=1):
        status, printed, _ = run("next", store)
    assert status == 0
    assert len(pauses) == 2
    assert f"epoch {epochs(run, store)[QWEN['model']]}." in printed


def test_epoch_that_is_replaced_for_ever_fails(
    store: str, run: Command, pauses: list[float]
) -> None:
    run("next", store, "--no-wait")
    (path,) = Path(store).glob("epochs/1/*")
    with Replacing(path, path.read_bytes(), num_times=1000):
        status, _, said = run("next", store)
    assert status == 1
    assert QWEN["model"] in said


class Replacing:
    """A thread that puts old bytes back whenever others are in a file."""

    def __init__(self, path: Path, old: bytes, num_times: int) -> None:
        self._path, self._old, self._left = path, old, num_times
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.002):
            if self._left and self._path.read_bytes() != self._old:
                self._left -= 1
                self._path.write_bytes(self._old)
