# SPDX-License-Identifier: Apache-2.0
"""`ecshare du`, `ls`, `stat` and `verify`: on folders, and on a real S3 server."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ecshare.cli import main
from ecshare.store.format import PROLOGUE_BYTES
from ecshare.store.keys import Key, Kind, gap_key, manifest_key, namespace_digest, object_key
from lab.servers.processes import Port
from lab.servers.s3 import SeaweedFS
from tests.ecshare.conftest import start
from tests.ecshare.upkeep.stores import note, put, space

Command = Callable[..., tuple[int, str, str]]
QWEN = {"model": "Qwen/Qwen2.5-VL", "dtype": "bfloat16", "epoch": "", "integrity": ""}
LLAVA = {**QWEN, "model": "llava", "dtype": "float16"}
SECRET = "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2"


def keys(facts: dict[str, Any], kind: Kind, num: int) -> list[Key]:
    return [object_key(kind, namespace_digest(facts), f"item {n}") for n in range(num)]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Run a command on the folder `store`; return its status, and what it printed."""
    (tmp_path / "store").mkdir(mode=0o700)

    def run(name: str, *arguments: str, store: str = "") -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([name, store or f"{tmp_path}/store", *arguments])
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run


@pytest.fixture
def store(tmp_path: Path, run: Command) -> Path:
    """Return the folder, with embeddings and KV of one model and KV of another one."""
    start(tmp_path, QWEN, "", *keys(QWEN, Kind.EC, 2))
    start(tmp_path, QWEN, "", *keys(QWEN, Kind.KV, 3), kind=Kind.KV)
    start(tmp_path, LLAVA, "", *keys(LLAVA, Kind.KV, 4), kind=Kind.KV)
    (tmp_path / "store" / "readme.txt").write_text("not ours")
    return tmp_path / "store"


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def damage(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[PROLOGUE_BYTES] ^= 1
    path.unlink()
    path.write_bytes(body)


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("model", {"Qwen/Qwen2.5-VL": 5, "llava": 4}),
        ("kind", {"kv": 7, "ec": 2}),
        ("use", {"within 1 h": 9}),
        ("tenant", {"": 9}),
    ],
)
def test_du_groups_objects(run: Command, store: Path, by: str, expected: dict[str, int]) -> None:
    status, out, _ = run("du", "--by", by, "--json")
    assert status == 0
    assert {line[by]: line["num_objects"] for line in lines(out)} == expected
    one = PROLOGUE_BYTES + 1000
    assert all(line["num_bytes"] == one * line["num_objects"] for line in lines(out))


def test_du_prints_a_table_and_a_total(run: Command, store: Path) -> None:
    status, out, _ = run("du")
    assert status == 0
    header, first, second, total = out.splitlines()
    assert header.split() == ["model", "objects", "size", "stored", "last", "use"]
    assert first.split()[:4] == ["Qwen/Qwen2.5-VL", "5", "25,480", "B"]
    assert second.split()[:2] == ["llava", "4"]
    assert total == f"{store}: 9 objects, 45,864 B; 1 keys are not ecshare's"


def test_du_counts_only_what_is_chosen(run: Command, store: Path) -> None:
    _, out, _ = run("du", "--model", "Qwen/Qwen2.5-VL", "--kind", "kv", "--json")
    assert [line["num_objects"] for line in lines(out)] == [3]
    _, out, _ = run("du", "--namespace", namespace_digest(LLAVA), "--by", "namespace", "--json")
    (line,) = lines(out)
    assert (line["kind"], line["model"], line["num_objects"]) == ("kv", "llava", 4)


def test_du_groups_by_day_and_by_last_use(run: Command, tmp_path: Path) -> None:
    root, own = tmp_path / "store", keys(QWEN, Kind.KV, 3)
    for n, key in enumerate(own):
        put(root, key, hours=50 + 30 * n)
    note(root, [(own[2], 0, 0)], hours=2)
    _, out, _ = run("du", "--by", "use", "--json")
    assert {line["use"]: line["num_objects"] for line in lines(out)} == {
        "within 1 d": 1,
        "within 3 d": 1,
        "within 7 d": 1,
    }
    _, out, _ = run("du", "--by", "day", "--json")
    days = [line["day"] for line in lines(out)]
    assert days == sorted(days)
    assert len(days) == 3


def test_du_escapes_hostile_names(run: Command, tmp_path: Path) -> None:
    odd = {"model": "\x1b[2J\nok " + "x" * 100_000}
    start(tmp_path, odd, "", *keys(odd, Kind.KV, 1), kind=Kind.KV)
    for command in ("du", "ls"):
        status, out, _ = run(command)
        assert status == 0
        assert "\x1b" not in out
        assert "\nok" not in out
        assert len(out) < 3000
        assert "\x1b" not in run(command, "--json")[1]


def test_du_names_namespaces_without_a_manifest(run: Command, store: Path) -> None:
    (store / manifest_key(Kind.KV, namespace_digest(LLAVA))).unlink()
    _, out, _ = run("du", "--json")
    assert {line["model"] for line in lines(out)} == {"Qwen/Qwen2.5-VL", "(no manifest)"}


def test_ls_lists_namespaces_and_objects(run: Command, store: Path) -> None:
    _, out, _ = run("ls", "--json")
    assert {(line["kind"], line["model"], line["dtype"]) for line in lines(out)} == {
        ("ec", "Qwen/Qwen2.5-VL", "bfloat16"),
        ("kv", "Qwen/Qwen2.5-VL", "bfloat16"),
        ("kv", "llava", "float16"),
    }
    _, out, _ = run("ls", "--objects", "--model", "llava", "--json")
    assert {line["key"] for line in lines(out)} == set(keys(LLAVA, Kind.KV, 4))
    _, out, _ = run("ls", "--objects", "--limit", "2")
    assert len(out.splitlines()) == 2
    _, out, _ = run("ls", "--model", "lava")
    assert "nothing is stored of model lava (there: Qwen/Qwen2.5-VL, llava)" in out


def test_stat_shows_an_object_by_key_and_by_digits(run: Command, store: Path) -> None:
    (key,) = keys(QWEN, Kind.EC, 1)
    status, out, _ = run("stat", key, "--json")
    (said,) = lines(out)
    assert status == 0
    assert (said["state"], said["model"], said["shape"]) == ("intact", "Qwen/Qwen2.5-VL", [1000])
    _, out, _ = run("stat", key.rpartition("/")[2][:10], "--json")
    assert key in {line["key"] for line in lines(out)}
    assert len(lines(out)) == 3, "the same name in three namespaces"
    status, out, _ = run("stat", key)
    assert "state       intact" in out


def test_stat_of_a_damaged_or_missing_object_has_status_1(run: Command, store: Path) -> None:
    (key,) = keys(QWEN, Kind.EC, 1)
    damage(store / key)
    status, out, _ = run("stat", key)
    assert status == 1
    assert "damaged: corrupt object: the checksum differs" in out
    (store / key).unlink()
    status, _, err = run("stat", key)
    assert status == 1
    assert "there is no object" in err


def test_stat_has_status_1_if_one_of_several_is_damaged(run: Command, store: Path) -> None:
    digits = keys(QWEN, Kind.EC, 1)[0].rpartition("/")[2][:10]
    for bad in (keys(QWEN, Kind.EC, 1)[0], keys(QWEN, Kind.KV, 1)[0], keys(LLAVA, Kind.KV, 1)[0]):
        good = (store / bad).read_bytes()
        damage(store / bad)
        assert run("stat", digits)[0] == 1
        (store / bad).write_bytes(good)
    assert run("stat", digits)[0] == 0


def test_stat_does_not_report_an_absence_note_as_damaged(run: Command, store: Path) -> None:
    note_key = gap_key(keys(QWEN, Kind.KV, 9)[8])
    (store / note_key).parent.mkdir(exist_ok=True)
    (store / note_key).write_bytes(b"x")
    status, out, _ = run("stat", note_key)
    assert status == 0
    assert "a note that the object will not be stored" in out


def test_very_long_model_names_are_cut_and_stay_distinct(run: Command, tmp_path: Path) -> None:
    root = tmp_path / "store"
    one, two = ("m" * 60_000 + end for end in "ab")
    for n, name in enumerate((one, two)):
        digest = space(root, Kind.KV, model=name)
        for m in range(n + 1):
            put(root, object_key(Kind.KV, digest, f"{m}"), hours=1)
    status, out, _ = run("du", "--json")
    assert status == 0
    assert [line["num_objects"] for line in lines(out)] == [2, 1]
    assert max(map(len, out.splitlines())) < 2000
    assert lines(run("du", "--model", two, "--json")[1])[0]["num_objects"] == 2


def test_closed_output_pipe_ends_the_command_silently(store: Path) -> None:
    command = [sys.executable, "-m", "ecshare", "ls", str(store), "--objects"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert ended.returncode == 1
    assert ended.stderr == b""


@pytest.mark.parametrize("key", ["../../etc/passwd", "abc", "kv/2/x", "\x1b[2J" * 9, "0" * 65])
def test_stat_refuses_an_invalid_key(run: Command, key: str) -> None:
    status, _, err = run("stat", key)
    assert status == 2
    assert "is neither the key of an object nor" in err
    assert "\x1b" not in err


def test_verify_finds_and_removes_damaged_objects_only(run: Command, store: Path) -> None:
    bad = keys(QWEN, Kind.KV, 1)[0]
    damage(store / bad)
    status, out, _ = run("verify", "--json")
    (said,) = lines(out)
    assert status == 1
    assert (said["num_read"], [each[0] for each in said["damaged"]]) == (9, [bad])
    assert (store / bad).exists(), "without --repair nothing is removed"
    status, out, _ = run("verify", "--repair")
    assert status == 0
    assert "read 9 objects, 45,864 B; 1 are damaged; 1 of them removed" in out
    assert not (store / bad).exists()
    assert run("verify", "--all")[0] == 0
    assert len([*store.rglob("*")]) > 8


def test_verify_keeps_objects_without_a_mac_of_the_key(run: Command, store: Path) -> None:
    options = json.dumps({"url": str(store), "integrity_key": SECRET})
    status, out, _ = run("verify", "--repair", store=options)
    assert status == 0
    assert "0 are damaged; 9 have no MAC of this integrity key" in out
    assert run("verify", "--json")[1].startswith('{"url"')
    assert lines(run("verify", "--json")[1])[0]["num_read"] == 9


def test_verify_reads_a_sample_of_each_namespace(run: Command, store: Path) -> None:
    assert lines(run("verify", "--sample", "2", "--json")[1])[0]["num_read"] == 6
    chosen = run("verify", "--sample", "1", "--model", "llava", "--json")[1]
    assert lines(chosen)[0]["num_read"] == 1


@pytest.mark.s3
def test_store_commands_work_on_s3(run: Command, tmp_path: Path, seaweed: SeaweedFS) -> None:
    url = f"{seaweed.url}/store-commands"
    options = {"url": url, "storage_options": seaweed.storage_options}
    start(tmp_path, QWEN, url, *keys(QWEN, Kind.KV, 3), kind=Kind.KV,
          storage_options=seaweed.storage_options)  # fmt: skip
    argument = json.dumps(options)
    assert lines(run("du", "--json", store=argument)[1])[0]["num_objects"] == 3
    assert len(run("ls", "--objects", store=argument)[1].splitlines()) == 3
    assert run("verify", store=argument)[0] == 0
    assert run("stat", keys(QWEN, Kind.KV, 1)[0], store=argument)[0] == 0


@pytest.mark.parametrize("command", [("du",), ("ls",), ("verify",), ("stat", "0" * 64)])
def test_unreachable_store_is_reported_in_one_sentence_with_status_1(
    run: Command, command: tuple[str, ...]
) -> None:
    port = Port()
    storage = {"key": "a", "secret": "b", "endpoint_url": f"http://127.0.0.1:{port.number}"}
    argument = json.dumps({"url": "s3://bucket/x", "storage_options": storage, "io_timeout_s": 0.1})
    name, *more = command
    status, _, err = run(name, *more, store=argument)
    port.release()
    assert status == 1
    assert len(err.splitlines()) == 1
    assert "s3://bucket/x" in err
    assert "Traceback" not in err
