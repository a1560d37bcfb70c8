# SPDX-License-Identifier: Apache-2.0
"""`ecshare bench`: what it measures and prints, and that it removes its objects."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ecshare.cli import main
from ecshare.commands.measuring import Limits, Measurement
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ObjectCorrupt, StoreDenied, StoreError
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.keys import Key
from ecshare.store.objects import Buffer, Sink
from ecshare.store.open import open_store
from lab.servers.processes import Port
from lab.servers.s3 import SeaweedFS
from tests.waiting import wait_until

Bench = Callable[..., tuple[int, str, str]]
SHORT = ("--seconds", "0.1", "--size", "100kB")


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Bench:
    """Run the command on the folder `tmp_path`."""
    tmp_path.chmod(0o700)

    def run(*arguments: str, store: str = "") -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["bench", store or str(tmp_path), *arguments])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_bench_prints_a_table_and_removes_its_objects(bench: Bench, tmp_path: Path) -> None:
    status, out, err = bench(*SHORT)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{tmp_path}: objects of 100,000 B"
    assert [line.split()[0] for line in lines[2:]] == ["put"] * 2 + ["look-up"] * 2 + ["read"] * 2
    assert files(tmp_path) == []


def test_json_has_a_line_for_each_operation_and_for_the_model(bench: Bench) -> None:
    model = ("--token-bytes", "500", "--tokens", "1000", "--prefill-rate", "2000")
    status, out, _ = bench("--seconds", "0.1", *model, "--json")
    assert status == 0
    *readings, prompt = [json.loads(line) for line in out.splitlines()]
    assert [each["at_once"] for each in readings] == ["1", "as engines"] * 3
    assert all(each["number"] > 0 and each["p50_ms"] <= each["p99_ms"] for each in readings)
    assert {each["bytes"] for each in readings} == {256 * 500}
    read = max(each["mb_per_s"] for each in readings if each["what"] == "read")
    look_up_s = readings[2]["p50_ms"] / 1e3
    assert prompt["load_s"] == pytest.approx(2 * look_up_s + 0.5 / read)
    assert prompt["compute_s"] == 0.5


def test_load_time_of_a_models_kv_is_printed(bench: Bench) -> None:
    model = ("--token-bytes", "500", "--tokens", "8000")
    _, out, _ = bench("--seconds", "0.1", *model)
    assert "\na prompt of 8,000 tokens loads in " in out
    assert "tokens/s takes as long" in out
    _, out, _ = bench("--seconds", "0.1", *model, "--prefill-rate", "4000")
    assert "your engine computes it in 2 s" in out


def test_bench_moves_at_most_the_given_bytes(bench: Bench) -> None:
    status, out, _ = bench("--seconds", "1", "--size", "10kB", "--most", "120kB", "--json")
    assert status == 0
    moved = [json.loads(line) for line in out.splitlines()]
    numbers = [each["number"] for each in moved if each["what"] != "look-up"]
    assert all(1 <= number <= 3 for number in numbers)
    assert max(numbers) == 3, "the bytes end it, not the time"


@pytest.mark.s3
def test_bench_of_a_bucket_removes_its_objects(bench: Bench, seaweed: SeaweedFS) -> None:
    url = f"{seaweed.url}/bench"
    store = json.dumps({"url": url, "storage_options": seaweed.storage_options})
    status, out, err = bench(*SHORT, "--json", store=store)
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == 6
    assert seaweed_keys(store) == []


def seaweed_keys(store: str) -> list[str]:
    async def keys() -> list[str]:
        opened = open_store(StoreConfig(**json.loads(store)), "options")
        try:
            return [info.key async for info in opened.list("")]
        finally:
            await opened.close()

    return asyncio.run(keys())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_bench_stopped_by_a_signal_removes_its_objects(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "ecshare", "bench", str(tmp_path), "--seconds", "600"]
    process = subprocess.Popen([*command, "--size", "4MB", "--most", "9GB"])
    wait_until(lambda: len(files(tmp_path)) > 3)
    process.send_signal(number)
    assert process.wait(20) == 128 + number
    assert files(tmp_path) == []


def test_objects_of_a_killed_bench_are_removed_by_gc(bench: Bench, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ecshare", "bench", str(tmp_path), "--seconds", "600"]
    process = subprocess.Popen([*command, "--size", "1MB"])
    wait_until(lambda: len(files(tmp_path)) > 3)
    process.kill()
    process.wait()
    for path in files(tmp_path):
        os.utime(path, (time.time() - 25 * 3600,) * 2)
    with pytest.raises(SystemExit):
        main(["gc", str(tmp_path)])
    assert not [path for path in files(tmp_path) if "bench" in path.name]


class Faulty(DirectoryStore):
    """Fails where `fault` says."""

    fault = ""

    async def put(self, key: Key, body: Buffer, *, replace: bool = False) -> bool:
        if self.fault == "put":
            raise StoreDenied("read-only")
        if self.fault == "slow":
            await asyncio.sleep(0.2)
        return await super().put(key, body, replace=replace)

    async def get(self, key: Key, sink: Sink) -> None:
        if self.fault != "get":
            return await super().get(key, sink)
        sink.begin(1000)
        return sink.write(0, bytes(1000))

    async def delete(self, keys: Any) -> None:
        if self.fault in ("put", "delete") and keys:
            raise StoreDenied("nothing is removed")
        await super().delete(keys)


@pytest.mark.parametrize(("fault", "error"), [("put", StoreDenied), ("get", ObjectCorrupt)])
async def test_measurement_ended_by_a_store_error_leaves_no_objects(
    tmp_path: Path, fault: str, error: type[StoreError]
) -> None:
    config = StoreConfig(url=str(tmp_path))
    store = Faulty(str(tmp_path))
    store.fault = fault
    measurement = Measurement(store, config, Limits(1000, 0.1, 10**6))
    with pytest.raises(error):
        await measurement.run(lambda: None)
    assert await measurement.remove() == ""
    await store.close()
    assert files(tmp_path) == []


async def test_removal_waits_for_puts_in_flight(tmp_path: Path) -> None:
    store = Faulty(str(tmp_path))
    store.fault = "slow"
    measurement = Measurement(store, StoreConfig(url=str(tmp_path)), Limits(1000, 9.0, 10**6))
    running = asyncio.create_task(measurement.run(lambda: None))
    await asyncio.sleep(0.1)
    running.cancel()
    await asyncio.wait([running])
    assert await measurement.remove() == ""
    await asyncio.sleep(0.3)
    await store.close()
    assert files(tmp_path) == []


async def test_removal_returns_why_objects_are_left(tmp_path: Path) -> None:
    store = Faulty(str(tmp_path))
    store.fault = "delete"
    config = StoreConfig(url=str(tmp_path))
    measurement = Measurement(store, config, Limits(1000, 0.1, 10**6))
    await measurement.run(lambda: None)
    assert await measurement.remove() == "nothing is removed"
    await store.close()


def test_unreachable_store_is_reported_with_status_1(bench: Bench) -> None:
    port = Port()
    storage = {"key": "a", "secret": "b", "endpoint_url": f"http://127.0.0.1:{port.number}"}
    options = {"url": "s3://bucket/x", "storage_options": storage, "io_timeout_s": 0.5}
    status, out, err = bench(*SHORT, store=json.dumps(options))
    port.release()
    assert (status, out) == (1, "")
    assert "s3://bucket/x: " in err
    assert "Traceback" not in err


WRONG = [
    (("--size", "much"), "--size: 'much' is no size"),
    (("--size", "0"), "'--size': '0' is not a size"),
    (("--size", "1TB"), "'--size': '1TB' is not a size"),
    (("--most", "-1"), "--most: '-1' is no size"),
    (("--most", "1MB"), "--most: less than four objects"),
    (("--most", "20GB"), "--most: This may move 20.0 GB"),
    (("--seconds", "nan"), "'--seconds': 'nan'"),
    (("--seconds", "1000"), "'--seconds': '1000'"),
    (("--layers", "2"), "--kv-heads: missing"),
    (("--gpus", "0"), "'--gpus': '0'"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_wrong_argument_is_named_with_status_2(
    bench: Bench, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    status, out, err = bench(*arguments)
    assert (status, out) == (2, ""), err
    assert words in err
    assert files(tmp_path) == []
