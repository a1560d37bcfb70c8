# SPDX-License-Identifier: Apache-2.0
"""The `ecshare` command: the doctor's findings, and errors for wrong arguments."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ecshare import __version__
from ecshare.cli import main
from ecshare.commands.group import COMMANDS
from ecshare.store.format import PROLOGUE_BYTES
from ecshare.store.keys import Kind, manifest_key, namespace_digest, object_key
from lab.servers.processes import Port
from lab.servers.s3 import Rclone, SeaweedFS
from tests.conftest import LOGS
from tests.ecshare.conftest import Doctor, start

FACTS = {"model": "qwen", "weights": "aa", "dtype": "bfloat16", "epoch": "", "integrity": ""}
NAMESPACE = namespace_digest(FACTS)
KEY = object_key(Kind.EC, NAMESPACE, "picture")
INTEGRITY_KEY = "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2"


def test_doctor_accepts_a_new_folder(doctor: Doctor, tmp_path: Path) -> None:
    status, text = doctor()
    assert status == 0, text
    assert "PROBLEM" not in text
    assert "stores, returns and removes objects" in text
    assert "no engine that stores any" in text
    assert not list((tmp_path / "store").iterdir()), "not even an empty folder is left"


@pytest.mark.s3
def test_doctor_examines_a_bucket(doctor: Doctor, tmp_path: Path, seaweed: SeaweedFS) -> None:
    url, options = f"{seaweed.url}/doctor", seaweed.storage_options
    start(tmp_path, FACTS, url, KEY, storage_options=options)
    status, text = doctor(url=url, storage_options=options)
    assert status == 0, text
    assert f"{NAMESPACE}: 1 objects, 5,096 B" in text
    assert f"{NAMESPACE}: 0 of 1 objects that were read are damaged" in text


@pytest.mark.s3
def test_doctor_notes_a_server_that_overwrites(doctor: Doctor) -> None:
    with Rclone(LOGS, "rclone-doctor") as server:
        status, text = doctor(url=server.url, storage_options=server.storage_options)
    assert status == 0, text
    assert re.search("^note +store: ignores create-only puts", text, re.MULTILINE)


def test_doctor_names_differing_namespace_facts_once(doctor: Doctor, tmp_path: Path) -> None:
    other = FACTS | {"epoch": "2", "dtype": "float16"}
    start(tmp_path, FACTS, "", KEY, object_key(Kind.EC, NAMESPACE, "other"))
    start(tmp_path, other)
    (tmp_path / "store" / KEY).with_name("readme.txt").write_text("not ours")
    status, text = doctor()
    assert status == 0, text
    assert f"{NAMESPACE}: 2 objects" in text
    assert "1 files there are not ecshare's" in text
    assert text.count("share nothing") == 1
    one, two = sorted((NAMESPACE, namespace_digest(other)))
    facts = {NAMESPACE: FACTS, namespace_digest(other): other}
    assert f"engines of {one} and of {two} share nothing, because of:\n" in text
    for field in ("dtype", "epoch"):
        assert f'{field}: "{facts[one][field]}" != "{facts[two][field]}"' in text


def test_doctor_names_damaged_objects(doctor: Doctor, tmp_path: Path) -> None:
    start(tmp_path, FACTS, "", KEY)
    path = tmp_path / "store" / KEY
    body = bytearray(path.read_bytes())
    body[PROLOGUE_BYTES] ^= 1
    path.unlink()
    path.write_bytes(body)
    status, text = doctor()
    assert status == 1
    assert "1 of 1 objects that were read are damaged" in text
    assert KEY.rpartition("/")[2] in text
    assert doctor("--sample", "0")[0] == 0


def test_doctor_does_not_verify_objects_of_another_integrity_key(
    doctor: Doctor, tmp_path: Path
) -> None:
    start(tmp_path, FACTS, "", KEY)
    status, text = doctor(integrity_key=INTEGRITY_KEY)
    assert status == 0, text
    assert f"{NAMESPACE}: not verified, because it was written with another integrity_key" in text
    assert INTEGRITY_KEY not in text


def test_doctor_escapes_a_hostile_manifest(doctor: Doctor, tmp_path: Path) -> None:
    odd = {"model": "\x1b[2J" + "x" * 100_000, "a\nok      store: fine": 1}
    start(tmp_path, FACTS)
    path = tmp_path / "store" / manifest_key(Kind.EC, namespace_digest(odd))
    path.write_text(json.dumps(odd))
    status, text = doctor()
    assert status == 0
    assert "\x1b" not in text
    assert "\nok      store: fine" not in text
    assert len(text) < 10_000


def test_doctor_reports_an_unreachable_store(doctor: Doctor) -> None:
    port = Port()
    storage = {"key": "a", "secret": "b", "endpoint_url": f"http://127.0.0.1:{port.number}"}
    status, text = doctor(url="s3://bucket/x", storage_options=storage, io_timeout_s=0.5)
    port.release()
    assert status == 1
    url = re.escape(storage["endpoint_url"])
    assert re.search(f"^PROBLEM +store: .*{url}", text, re.MULTILINE)
    assert "host cache" not in text, "later checks need the store"


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_doctor_reports_a_read_only_folder_unless_read_only(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "store").chmod(0o555)
    assert doctor()[0] == 1
    assert doctor("--read-only")[0] == 0


def test_doctor_reports_a_host_cache_open_to_others(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "host").mkdir(mode=0o777)
    (tmp_path / "host").chmod(0o777)
    status, text = doctor()
    assert status == 1
    assert "chmod 700" in text


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        return capsys.readouterr().err

    return refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("heal",), "No such command 'heal'"),
        (("doctor",), "Missing argument 'STORE'"),
        (("doctor", "relative/folder"), "options.url: .*absolute folder"),
        (("doctor", '{"url": "/x", "wait": 1}'), "options.wait: unknown option"),
        (
            ("doctor", '{"ec_connector": "ECShareConnector"}'),
            "ec_connector_extra_config.url: missing",
        ),
        (("doctor", "{"), "argument store: not JSON"),
        (("doctor", "@/no/such/file"), "argument store: /no/such/file cannot be read"),
        (("doctor", "/tmp", "--sample", "x"), "'--sample': 'x' is not a whole number, 0 or more"),
        (("doctor", "/tmp", "--sample", "-1"), "'--sample': '-1' is not a whole number, 0 or more"),
        (
            ("doctor", '{"url": "/x", "integrity_key": "short"}'),
            "key: it holds 5 bytes",
        ),
    ],
)
def test_wrong_arguments_are_named(
    refused: Callable[..., str], arguments: tuple[str, ...], words: str
) -> None:
    assert re.search(words, refused(*arguments))


def test_doctor_runs_as_a_module_without_torch_or_vllm(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError")
    (tmp_path / "vllm.py").write_text("raise ImportError")
    (tmp_path / "store").mkdir()
    command = [sys.executable, "-m", "ecshare", "doctor", f"{tmp_path}/store"]
    paths = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    ended = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Run the command line; return its status and all that it printed."""

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out + printed.err

    return run


def test_version_flag_prints_the_version(run: Doctor) -> None:
    assert run("--version") == (0, f"ecshare {__version__}\n")


def test_command_without_arguments_prints_help(run: Doctor) -> None:
    status, text = run()
    assert status == 0
    assert (status, text) == run("--help")
    for command in COMMANDS:
        assert re.search(f"^ +{command} +[a-z]", text, re.MULTILINE)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"router"}))
def test_every_command_explains_itself(run: Doctor, command: str) -> None:
    status, text = run(command, "--help")
    assert status == 0
    assert text.startswith(f"Usage: ecshare {command} ")
    assert "STORE is a url" in text or "STORE" not in text


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_completion_prints_the_script_of_a_shell(run: Doctor, shell: str) -> None:
    status, text = run("completion", shell)
    assert status == 0
    assert f"_ECSHARE_COMPLETE={shell}_complete" in text


def test_bash_completes_commands_and_options() -> None:
    """As bash asks, by the script that `ecshare completion bash` prints."""

    def complete(words: str, at: int) -> list[str]:
        asked = {"_ECSHARE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        command = [sys.executable, "-c", "from ecshare.cli import main; main()"]
        return subprocess.check_output(command, env=os.environ | asked, text=True).split()

    assert complete("ecshare do", 1) == ["plain,doctor"]
    assert "plain,--max-bytes" in complete("ecshare gc --", 2)


def test_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('no numpy')")
    paths = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    ended = subprocess.run(
        [sys.executable, "-m", "ecshare", "gc", str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        check=False,
    )
    assert ended.returncode == 2
    assert "gc: no numpy: pip install numpy rich (ecshare's extra [cli])" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_doctor_prints_json_lines(doctor: Doctor) -> None:
    status, text = doctor("--json")
    assert status == 0
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["level"] for line in lines} <= {"ok", "note"}
    assert all(line.keys() == {"topic", "level", "text", "details"} for line in lines)


def test_router_command_gets_all_further_arguments(run: Doctor) -> None:
    status, text = run("router", "--help")
    assert status == 0
    assert text.startswith("usage: ecshare router ")
    assert "--decoder" in text
    status, text = run("router", "--decoder", "ftp://x", "--port", "1")
    assert status == 2
    assert "ecshare router: error: argument --decoder" in text
    assert run("--", "router")[0] == 2
