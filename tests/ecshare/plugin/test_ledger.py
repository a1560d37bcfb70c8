# SPDX-License-Identifier: Apache-2.0
import os
import time
from pathlib import Path
from types import SimpleNamespace

from ecshare.plugin.ledger import Ledger, Totals, grown, open_ledger


def test_ledger_is_read_only_by_its_own_engine(tmp_path: Path) -> None:
    worker, scheduler = Ledger(tmp_path, "engine"), Ledger(tmp_path, "engine")
    assert scheduler.read() == {}
    worker.write(0, {"items/saved": 1})
    worker.write(1, {"items/failed": 2})
    worker.write(0, {"items/saved": 3.5})
    assert scheduler.read() == {0: {"items/saved": 3.5}, 1: {"items/failed": 2}}
    assert Ledger(tmp_path, "another").read() == {}


def test_data_parallel_engines_have_separate_ledgers(tmp_path: Path) -> None:
    """vLLM gives each of them data-parallel rank 0 if they share no layers."""

    def opened(index: int) -> Ledger:
        config = SimpleNamespace(
            ec_transfer_config=SimpleNamespace(engine_id="engine"),
            parallel_config=SimpleNamespace(data_parallel_rank=0, data_parallel_index=index),
        )
        return open_ledger(config, SimpleNamespace(root=tmp_path))  # type: ignore[arg-type]

    opened(0).write(0, {"items/saved": 1})
    assert opened(0).read() == {0: {"items/saved": 1}}
    assert opened(1).read() == {}


def test_engine_id_cannot_escape_the_ledger_folder(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "host", "../../evil/\x00x")
    (tmp_path / "host").mkdir()
    ledger.write(0, {"items/saved": 1})
    assert ledger.read() == {0: {"items/saved": 1}}
    assert [path.name for path in tmp_path.iterdir()] == ["host"]


def test_damaged_ledger_file_is_ignored(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "engine")
    ledger.write(0, {"items/saved": 1})
    ledger.write(1, {"items/saved": 1})
    (path,) = (path for path in (tmp_path / ".ledgers").iterdir() if path.suffix == ".0")
    path.write_bytes(b'{"items/saved": "many"}')
    assert ledger.read() == {1: {"items/saved": 1}}
    blocked = Ledger(tmp_path / "none", "engine")
    blocked.write(0, {"items/saved": 1})
    assert blocked.read() == {}
    blocked.close()


def test_close_removes_own_and_abandoned_files(tmp_path: Path) -> None:
    ours, living, killed = (Ledger(tmp_path, name) for name in ("ours", "living", "killed"))
    killed.write(0, {"items/saved": 1})
    (path,) = (tmp_path / ".ledgers").iterdir()
    long_ago_s = time.time() - 30 * 86_400
    os.utime(path, (long_ago_s, long_ago_s))
    for ledger in (ours, living):
        ledger.write(0, {"items/saved": 1})
    ours.close()
    assert (ours.read(), killed.read()) == ({}, {})
    assert living.read() == {0: {"items/saved": 1}}


def test_repeated_totals_are_counted_once() -> None:
    known: Totals = {}
    assert grown(known, {0: {"a": 2.0}, 1: {"a": 1.0}}) == {"a": 3}
    assert grown(known, {0: {"a": 2.0}}) == {}
    assert grown(known, {0: {"a": 5.0, "b": 1.0}, 1: {"a": 1.0}}) == {"a": 3, "b": 1}
    assert grown(known, {0: {"a": 4.0}}) == {}, "a late, older report"
    assert grown(known, {0: {"a": 5.0, "now/c": 7.0}}) == {"now/c": 7}
