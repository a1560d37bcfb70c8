# SPDX-License-Identifier: Apache-2.0
"""The router behind nginx, with the configuration of examples/proxy."""

import asyncio
import io
import json
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ecshare.router.api.chat import CHAT
from ecshare.router.options.config import RouterConfig
from lab.servers.processes import LOOPBACK, Port
from tests.docs.pages import ROOT
from tests.ecshare.router.answers import EVENTS
from tests.ecshare.router.bodies import chat, picture
from tests.ecshare.router.fake_engine import Fleet, fleet
from tests.ecshare.router.held import Hanging, streaming_until
from tests.waiting import until

CONFIG = (ROOT / "examples" / "proxy" / "nginx.conf").read_text()
SOON_S = 30.0
# What a package's own configuration says around it.
AROUND = """\
daemon off; master_process off; pid {folder}/pid; error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies; proxy_temp_path {folder}/answers;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    {config}
}}
"""


@dataclass
class Behind:
    """A fleet, and the url at which nginx serves its router."""

    fleet: Fleet
    url: str
    port: int

    def post(self, body: object, **more: Any) -> Any:
        """Send a chat completion through nginx."""
        return self.fleet.client.post(self.url + CHAT, json=body, ssl=False, **more)


@pytest.fixture
def programs() -> None:
    for name in ("nginx", "openssl"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not here; Debian has it in the package of that name")


@asynccontextmanager
async def behind_nginx(folder: Path, **options: Any) -> AsyncIterator[Behind]:
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=x"
    )
    pem, port = folder / "both.pem", Port()
    made = subprocess.run([*command.split(), "-keyout", "-"], check=True, capture_output=True)
    pem.write_bytes(made.stdout)
    async with fleet(**options) as f:
        config = CONFIG
        for said, here in {
            "127.0.0.1:8000": f.url.removeprefix("http://"),
            "listen 443": f"listen {LOOPBACK}:{port.number}",
            "/etc/ssl/ecshare.pem": str(pem),
            "/etc/ssl/ecshare.key": str(pem),
        }.items():
            assert config.count(said) == 1, said
            config = config.replace(said, here)
        file = folder / "nginx.conf"
        file.write_text(AROUND.format(folder=folder, config=config))
        nginx = await asyncio.create_subprocess_exec("nginx", "-p", folder, "-c", file)

        async def listens() -> bool:
            with socket.socket() as client:
                return client.connect_ex((LOOPBACK, port.number)) == 0

        try:
            await until(listens)
            yield Behind(f, f"https://{LOOPBACK}:{port.number}", port.number)
        finally:
            nginx.terminate()
            await nginx.wait()
            port.release()


@pytest.mark.usefixtures("programs")
async def test_an_event_of_a_stream_passes_before_the_next_one(tmp_path: Path) -> None:
    let_go = asyncio.Event()
    async with behind_nginx(tmp_path) as here:
        here.fleet.d.answer = streaming_until(let_go)
        async with asyncio.timeout(SOON_S), here.post(chat(stream=True)) as answer:
            assert await answer.content.readexactly(len(EVENTS[0])) == EVENTS[0]
            let_go.set()
            assert await answer.content.read() == EVENTS[-1]


@pytest.mark.usefixtures("programs")
async def test_large_pictures_and_what_engines_read_pass(tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer k", "traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    async with behind_nginx(tmp_path) as here:
        body = io.BytesIO(json.dumps(chat(picture(b"x" * 20_000_000))).encode())
        url = here.url + CHAT
        async with here.fleet.client.post(url, data=body, headers=headers, ssl=False) as answer:
            assert answer.status == 200
            assert answer.headers["x-ecshare-path"] == "encode,prefill,decode"
        got = here.fleet.d.headers[-1]
        assert {got["authorization"], got["traceparent"]} == set(headers.values())


@pytest.mark.usefixtures("programs")
async def test_a_slow_upload_is_not_the_routers(tmp_path: Path) -> None:
    """nginx sends the body once it has all of it; the router itself would answer 408."""
    body = json.dumps(chat()).encode()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:10]
        await asyncio.sleep(2.5)
        yield body[10:]

    async with behind_nginx(tmp_path, client_timeout_s=1) as here:
        for url, status in ((here.url, 200), (here.fleet.url, 408)):
            async with here.fleet.client.post(url + CHAT, data=slowly(), ssl=False) as answer:
                assert answer.status == status


@pytest.mark.usefixtures("programs")
async def test_a_client_that_leaves_ends_its_request_at_the_engine(tmp_path: Path) -> None:
    async with behind_nginx(tmp_path) as here:
        here.fleet.d.answer = hanging = Hanging()
        asked = asyncio.create_task(here.post(chat()).__aenter__())
        await asyncio.wait_for(hanging.asked.wait(), SOON_S)
        asked.cancel()
        await here.fleet.client.close()  # aiohttp goes on to wait for the end of TLS
        await asyncio.wait_for(hanging.left.wait(), SOON_S)


@pytest.mark.usefixtures("programs")
async def test_pages_for_operators_are_not_served(tmp_path: Path) -> None:
    async with behind_nginx(tmp_path) as here:
        for path in ("/metrics", "/status", "/health", "/dashboard"):
            async with here.fleet.client.get(here.url + path, ssl=False) as answer:
                assert answer.status == 404
                assert answer.headers["Server"].startswith("nginx")
        async with here.fleet.client.get(here.url + "/ready", ssl=False) as answer:
            assert answer.status == 200


def test_limits_agree_with_the_routers_defaults() -> None:
    usual = RouterConfig(decoders=("http://d.example",))
    assert f"client_max_body_size {usual.max_body_bytes >> 20}m;" in CONFIG
    assert f"proxy_read_timeout {usual.timeout_s + 10:.0f}s;" in CONFIG
    assert f"keepalive_timeout {usual.client_timeout_s - 5:.0f}s;" in CONFIG
