# SPDX-License-Identifier: Apache-2.0
"""The wheel in empty environments: each extra installs what its entry point needs, and no more."""

import json
import os
import subprocess
import sys
import threading
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lab.servers.processes import Server
from lab.servers.s3 import SeaweedFS
from tests.bad_s3.server import BUCKET, BadS3
from tests.ecshare.store.azurite import CONTAINER, Azurite

ROOT = Path(__file__).parents[2]
PINNED = ("--constraint", str(ROOT / "constraints.txt"))
ROUTER_LIMIT_BYTES = 100_000_000
# `make release` names its wheel, and other Pythons.
PYTHON = os.environ.get("RELEASE_PYTHON", sys.executable)
KEPT: Any = {"capture_output": True, "text": True, "check": False}

pytestmark = pytest.mark.packaging


class Empty:
    """An environment with nothing in it, not even pip. Ours installs into it from outside."""

    def __init__(self, folder: Path) -> None:
        _checked(subprocess.run([PYTHON, "-m", "venv", "--without-pip", folder], **KEPT))
        self.python = folder / "bin" / "python"
        (self.site_packages,) = folder.glob("lib/python3*/site-packages")

    def install(self, *requirements: str) -> None:
        self.pip("install", "--quiet", *requirements)

    def pip(self, *arguments: str) -> str:
        pip = (sys.executable, "-m", "pip", "--python", str(self.python))
        return _checked(subprocess.run([*pip, *arguments], **KEPT))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run its Python, isolated: neither PYTHONPATH nor the working directory is searched."""
        return subprocess.run(
            [self.python, "-I", *arguments], capture_output=True, text=True, timeout=120
        )

    def doctor(self, url: str, **storage_options: Any) -> subprocess.CompletedProcess[str]:
        options = {"url": url, "storage_options": storage_options}
        return self.run("-m", "ecshare", "doctor", json.dumps(options))

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.site_packages.rglob("*") if path.is_file())


def _checked(ran: subprocess.CompletedProcess[str]) -> str:
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> str:
    if given := os.environ.get("RELEASE_WHEEL"):
        return given
    built = tmp_path_factory.mktemp("built")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(built))
    _checked(subprocess.run([*pip, str(ROOT)], **KEPT))
    (found,) = built.glob("*.whl")
    return str(found)


@pytest.fixture
def empty(tmp_path: Path) -> Empty:
    return Empty(tmp_path / "environment")


@pytest.fixture(scope="module")
def bare(wheel: str, tmp_path_factory: pytest.TempPathFactory) -> Empty:
    """Return an environment with the wheel, without extras."""
    empty = Empty(tmp_path_factory.mktemp("bare"))
    empty.install(wheel, *PINNED)
    return empty


def test_wheel_has_every_module_and_nothing_else(wheel: str) -> None:
    ours = {
        path.relative_to(ROOT).as_posix()
        for package in ("ecshare", "kvshare")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".html") or path.name == "py.typed"
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == ours


def test_the_bare_package_examines_a_folder(bare: Empty, tmp_path: Path) -> None:
    said = _checked(bare.doctor(str(tmp_path)))
    assert "stores, returns and removes objects" in said
    for module in ("numpy", "obstore", "safetensors", "torch", "vllm"):
        assert bare.run("-c", f"import {module}").returncode == 1


@pytest.mark.parametrize(
    ("url", "options", "needed"),
    [
        ("s3://bucket/x", {}, "obstore: pip install obstore botocore (ecshare's extra [s3])"),
        (
            "s3://bucket/x",
            {"s3_additional_kwargs": {}},
            "obstore has no option s3_additional_kwargs; that needs s3fs: pip install s3fs "
            "(ecshare's extra [s3fs])",
        ),
        ("gs://bucket/x", {}, "obstore: pip install obstore (ecshare's extra [gcs])"),
        (
            "az://container/x",
            {"account_name": "a"},
            "obstore: pip install obstore (ecshare's extra [azure])",
        ),
    ],
)
def test_store_without_its_extra_fails_with_a_sentence(
    bare: Empty, url: str, options: dict[str, Any], needed: str
) -> None:
    ran = bare.doctor(url, **options)
    assert ran.returncode == 2
    assert ran.stderr.endswith(f"{needed}\n")
    assert "Traceback" not in ran.stderr


def test_router_without_its_extra_fails_with_a_sentence(bare: Empty) -> None:
    ran = bare.run("-m", "ecshare.router", "--help")
    assert ran.returncode != 0
    assert "pip install" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_wheel_has_no_tests_lab_or_benchmarks(bare: Empty) -> None:
    for package in ("lab", "tests", "benchmarks"):
        ran = bare.run("-c", f"import {package}")
        assert ran.returncode != 0
        assert "ModuleNotFoundError" in ran.stderr


class Router(Server):
    """The router of an environment, in front of one engine."""

    def __init__(self, python: Path, engine: str, log_dir: Path) -> None:
        super().__init__("router", log_dir)
        self._command = [str(python), "-I", "-m", "ecshare.router", "--decoder", engine]

    def command(self) -> list[str]:
        return [*self._command, "--port", str(self.port.number)]


@contextmanager
def engine(answers: Mapping[str, Any]) -> Iterator[str]:
    """Run a server that has one JSON answer for each path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.dumps(answers.get(self.path, {})).encode()
            self.send_response(200 if self.path in answers else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 — as the base class spells it

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_router_extra_is_small_and_enough_to_answer(
    wheel: str, empty: Empty, tmp_path: Path
) -> None:
    empty.install(f"{wheel}[router]", *PINNED)
    assert empty.num_bytes() < ROUTER_LIMIT_BYTES
    answer = {"choices": [{"message": {"role": "assistant", "content": "a cat"}}]}
    answers = {
        "/health": {},
        "/v1/models": {"data": [{"id": "m"}]},
        "/v1/chat/completions": answer,
    }
    with engine(answers) as url, Router(empty.python, url, tmp_path) as router:
        asked = urllib.request.Request(
            f"{router.base_url}/v1/chat/completions",
            json.dumps({"model": "m", "messages": [{"role": "user", "content": "?"}]}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=30) as reply:
            assert json.load(reply) == answer


@pytest.mark.nightly
def test_spans_need_only_otel_extra(wheel: str, empty: Empty) -> None:
    arguments = ("--decoder=http://127.0.0.1:9", "--otlp-traces-endpoint=http://127.0.0.1:9")
    begins = f"from ecshare.router.options.arguments import parse_arguments as p; p({arguments!r})"
    begins += "; from ecshare.router.telemetry.spans import Spans; Spans.exported_to('http://127.0.0.1:9')"
    empty.install(f"{wheel}[router]", *PINNED)
    ran = empty.run("-c", begins)
    assert ran.returncode == 2
    assert "[otel]" in ran.stderr.splitlines()[-1]
    empty.install(f"{wheel}[otel]", *PINNED)
    _checked(empty.run("-c", begins))


def test_s3_extra_keeps_installed_boto3_and_reaches_s3(
    wheel: str, empty: Empty, seaweed: SeaweedFS
) -> None:
    empty.install("boto3")  # not pinned: the newest
    before = empty.pip("list", "--format=freeze")
    empty.install(f"{wheel}[s3]")
    after = empty.pip("list", "--format=freeze").splitlines()
    assert set(before.splitlines()) <= set(after)
    assert not [line for line in after if line.startswith(("s3fs", "aiobotocore", "numpy"))]
    empty.pip("check")
    said = _checked(empty.doctor(f"{seaweed.url}/s3", **seaweed.storage_options))
    assert "stores, returns and removes objects" in said


@pytest.mark.nightly
def test_s3fs_extra_reaches_s3_without_obstore(
    wheel: str, empty: Empty, seaweed: SeaweedFS
) -> None:
    empty.install(f"{wheel}[s3fs]", *PINNED)
    assert empty.run("-c", "import obstore").returncode == 1
    said = _checked(empty.doctor(f"{seaweed.url}/s3fs", **seaweed.storage_options))
    assert "stores, returns and removes objects" in said


@pytest.mark.azure
@pytest.mark.nightly
def test_azure_extra_reaches_azure(wheel: str, empty: Empty, azurite: Azurite) -> None:
    empty.install(f"{wheel}[azure]", *PINNED)
    ran = empty.doctor(f"az://{CONTAINER}/wheel", **azurite.storage_options())
    assert "stores, returns and removes objects" in _checked(ran)


@pytest.mark.nightly
def test_gcs_extra_reaches_google_storage(wheel: str, empty: Empty, gcs: BadS3) -> None:
    empty.install(f"{wheel}[gcs]", *PINNED)
    ran = empty.doctor(f"gs://{BUCKET}/wheel", endpoint_url=gcs.endpoint, token="anon")
    assert "stores, returns and removes objects" in _checked(ran)
