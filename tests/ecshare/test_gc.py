# SPDX-License-Identifier: Apache-2.0
"""`ecshare gc`: arguments, output, exit statuses, and a cleaner that is stopped or killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ecshare.cli import main
from ecshare.store.folder.store import TEMPORARY
from ecshare.store.keys import CLEANED_KEY, Kind, manifest_key, namespace_digest
from lab.servers.processes import Port
from tests.ecshare.upkeep.stores import NAMESPACE, age, ec, files, kept, kv, note, put, space
from tests.waiting import wait_until

Gc = Callable[..., tuple[int, str, str]]


@pytest.fixture
def gc(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Gc:
    """Run the command on the folder `tmp_path`; return its status, and what it printed."""

    def run(*arguments: str, store: str = "") -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["gc", store or str(tmp_path), *arguments])
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run


def process(root: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ecshare", "gc", str(root), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_gc_removes_objects_down_to_the_budget_and_counts_them(gc: Gc, tmp_path: Path) -> None:
    for n in range(10):
        put(tmp_path, kv(str(n)), hours=n, num_bytes=1000)
    status, out, err = gc("--max-bytes", "5kB")
    assert (status, err) == (0, "")
    assert "removed 6 objects, 6,000 B of 10,000 B" in out
    assert kept(tmp_path) == {kv(str(n)) for n in range(4)}


def test_dry_run_prints_a_table_by_model_and_removes_nothing(gc: Gc, tmp_path: Path) -> None:
    facts = {"model": "Qwen/Qwen2.5-VL-3B\x1b[2J"}
    own = namespace_digest(facts)
    (tmp_path / manifest_key(Kind.KV, own)).parent.mkdir(parents=True)
    (tmp_path / manifest_key(Kind.KV, own)).write_text(json.dumps(facts))
    for n in range(3):
        put(tmp_path, kv(str(n), namespace=own), hours=n, num_bytes=1000)
    put(tmp_path, ec("x"), hours=0)
    before = files(tmp_path)
    status, out, _ = gc("--max-bytes", "kv=1.1kB", "--dry-run")
    assert status == 0
    assert files(tmp_path) == before
    lines = out.splitlines()
    assert lines[0].split() == [
        "kind",
        "namespace",
        "model",
        "objects",
        "size",
        "to",
        "remove",
        "size",
    ]
    assert lines[1].split() == (
        ["kv", own, "Qwen/Qwen2.5-VL-3B\\x1b[2J", "3", "3,000", "B", "2", "2,000", "B"]
    )
    assert lines[2].split() == ["ec", NAMESPACE, "1", "100", "B", "0", "0", "B"]
    assert "would remove 2 objects" in lines[3]


def test_tenant_has_a_budget_of_its_own(gc: Gc, tmp_path: Path) -> None:
    """It covers both kinds together. Objects without a tenant or a manifest are not counted."""
    own = {kind: space(tmp_path, kind, model="a", tenant="acme") for kind in Kind}
    other = space(tmp_path, Kind.KV, model="a", tenant="acme2")
    gone = [kv("1", namespace=own[Kind.KV]), ec("2", own[Kind.EC])]
    kept_ones = [kv("3", namespace=own[Kind.KV]), kv("4", namespace=other), kv("5")]
    for n, key in enumerate([*gone, *kept_ones]):
        put(tmp_path, key, hours=9 - n)
    status, out, _ = gc("--max-bytes", "tenant:acme=150", "--ttl", "tenant:none=1", "--json")
    assert status == 0
    assert {name for name in kept(tmp_path) if "manifests" not in name} == set(kept_ones)
    rows = {row["namespace"]: row for row in json.loads(out)["rows"]}
    assert (rows[own[Kind.KV]]["tenant"], rows[NAMESPACE]["tenant"]) == ("acme", "")


def test_ttl_of_a_tenant_overrides_that_of_a_kind(gc: Gc, tmp_path: Path) -> None:
    own = space(tmp_path, Kind.KV, model="a", tenant="acme")
    for name in (own, NAMESPACE):
        for hours in (1, 3, 5):
            put(tmp_path, kv(str(hours), namespace=name), hours=hours)
    assert gc("--ttl", "tenant:acme=2", "--ttl", "kv=4")[0] == 0
    left = {name for name in kept(tmp_path) if "manifests" not in name}
    assert left == {kv("1", namespace=own), kv("1"), kv("3")}


def test_json_is_one_line(gc: Gc, tmp_path: Path) -> None:
    put(tmp_path, kv("x"), hours=30)
    status, out, _ = gc("--ttl", "24", "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["num_removed"], found["dry_run"], found["is_whole"]) == (1, False, True)
    (row,) = found["rows"]
    assert (row["kind"], row["namespace"], row["removed_bytes"]) == ("kv", NAMESPACE, 100)


def test_json_escapes_names_of_the_store(gc: Gc, tmp_path: Path) -> None:
    facts = {"model": "\ud800\x9b2J"}
    own = namespace_digest(facts)
    (tmp_path / manifest_key(Kind.KV, own)).parent.mkdir(parents=True)
    (tmp_path / manifest_key(Kind.KV, own)).write_text(json.dumps(facts))
    put(tmp_path, kv("x", namespace=own), hours=1)
    status, out, _ = gc("--ttl", "24", "--json")
    assert status == 0
    assert out.isascii()
    assert json.loads(out)["rows"][0]["model"] == facts["model"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-bytes", "much"), "--max-bytes: 'much' is no size"),
        (("--max-bytes", "-5GB"), "--max-bytes: '-5GB' is no size"),
        (("--max-bytes", "mm=5GB"), "'mm' is neither ec nor kv nor a namespace"),
        (("--max-bytes", "tenant:=5GB"), "'tenant:' is neither"),
        (("--max-bytes", "tenant:a/b\x1b=5GB"), "'tenant:a/b\\x1b' is neither"),
        (("--max-bytes", "5GB", "--max-bytes", "6GB"), "second value"),
        (("--ttl", "two days"), "--ttl: 'two days' is no number of hours"),
        (("--ttl", "nan"), "no number of hours"),
        (("--ttl", "\x1b[2J"), "'\\x1b[2J'"),
        (("--every", "0"), "not a number of minutes"),
        (("--older", "5"), "No such option '--older'"),
    ],
)
def test_wrong_argument_is_named_with_status_2(
    gc: Gc, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    put(tmp_path, kv("x"), hours=9999)
    status, _, err = gc(*arguments)
    assert status == 2
    assert words in err
    assert files(tmp_path) == {kv("x")}


def test_missing_folder_is_refused_and_not_created(gc: Gc, tmp_path: Path) -> None:
    status, _, err = gc(store=f"{tmp_path}/absent")
    assert status == 2
    assert "there is no folder" in err
    assert not (tmp_path / "absent").exists()


def test_unreachable_store_is_reported_in_one_sentence_with_status_1(gc: Gc) -> None:
    port = Port()
    storage = {"key": "a", "secret": "b", "endpoint_url": f"http://127.0.0.1:{port.number}"}
    options = {"url": "s3://bucket/x", "storage_options": storage, "io_timeout_s": 0.1}
    status, out, err = gc(store=json.dumps(options))
    port.release()
    assert (status, out) == (1, "")
    assert err.startswith("ecshare gc: s3://bucket/x: ")
    assert err.endswith("; 0 of 0 objects were removed; run it again\n")
    assert err.count("\n") == 1


def fill(root: Path, num: int) -> list[str]:
    """Store a chain of `num` chunks, all noted; return their keys in order."""
    chain = [kv(str(n)) for n in range(num)]
    for key in chain:
        put(root, key, hours=30)
    for start in range(0, num, 100):
        some = chain[start : start + 100]
        note(root, [(key, 2, start + n) for n, key in enumerate(some)])
    return list(chain)


@pytest.mark.parametrize("num_kills", [6, pytest.param(200, marks=pytest.mark.nightly)])
def test_cleaner_killed_at_any_point_loses_no_note(tmp_path: Path, num_kills: int) -> None:
    """kill -9 at random points of a run; the next run continues."""
    chain = fill(tmp_path, 3000)
    dice, mark = random.Random(36), tmp_path / CLEANED_KEY
    max_bytes = 300_000
    for _ in range(num_kills):
        max_bytes -= 250_000 // num_kills
        mark.unlink(missing_ok=True)
        cleaner = process(tmp_path, "--max-bytes", str(max_bytes))
        wait_until(mark.exists)
        time.sleep(dice.uniform(0, 0.3))
        cleaner.kill()
        cleaner.communicate()
        left = kept(tmp_path)
        assert len(left) * 100 >= max_bytes * 0.97 - 100
        # A batch of removals is carried out in any order.
        lost = [n for n, key in enumerate(chain) if key not in left]
        assert not lost or lost[0] >= len(left) - 1000, lost
    for name in files(tmp_path):
        if TEMPORARY.fullmatch(Path(name).name):  # of a cleaner that was killed while it wrote
            age(tmp_path / name, 2)
    assert process(tmp_path, "--max-bytes", "40000").communicate(timeout=60)[1] == ""
    assert kept(tmp_path) == set(chain[:388])
    assert len(files(tmp_path)) == 388 + len((CLEANED_KEY, "the index"))


def test_sigterm_stops_a_repeating_cleaner(tmp_path: Path) -> None:
    put(tmp_path, kv("x"), hours=30)
    cleaner = process(tmp_path, "--ttl", "24", "--every", "0.001")
    wait_until(lambda: not kept(tmp_path))
    put(tmp_path, kv("y"), hours=30)
    wait_until(lambda: not kept(tmp_path))
    os.kill(cleaner.pid, signal.SIGTERM)
    out, err = cleaner.communicate(timeout=30)
    assert cleaner.returncode == 0
    assert out.count("removed 1 objects") >= 1
    assert err == ""
