# SPDX-License-Identifier: Apache-2.0
"""A real browser for tests of pages: headless Chromium, asked by its DevTools protocol."""

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from tests.waiting import until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_START_S = 60.0
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-port=0",
)


class Tab:
    """One tab. `events` are those of the protocol, in order."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = count(1)
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            told = await self._socket.receive_json()
            if told.get("id") == number:
                assert "error" not in told, told
                result: dict[str, Any] = told["result"]
                return result
            self.events.append(told)

    async def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        options = {"returnByValue": True, "awaitPromise": True}
        told = await self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        await until(lambda: self.run(f"Boolean({condition})"))

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href == {json.dumps(url)} && document.readyState == 'complete'")

    async def look(self, *, width: int, height: int, dark: bool) -> None:
        """Give the tab a size and a colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, path: Path) -> None:
        """Write what the tab shows, at the size that `look` gave it, as a PNG."""
        told = await self.call("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(told["data"]))


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Tab]:
    """Start Chromium with an empty profile; yields a tab."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        *(CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    reading: asyncio.Task[bytes] | None = None
    try:
        assert process.stderr is not None
        async with asyncio.timeout(_START_S):
            while b"DevTools listening" not in (line := await process.stderr.readline()):
                assert line, "Chromium has ended"
        reading = asyncio.create_task(process.stderr.read())
        where = line.split(b"ws://")[1].split(b"/")[0].decode()
        async with aiohttp.ClientSession() as client:
            async with client.get(f"http://{where}/json/list") as response:
                url = next(each for each in await response.json() if each["type"] == "page")
            socket_url = url["webSocketDebuggerUrl"]
            async with client.ws_connect(socket_url, max_msg_size=2**28) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.call(f"{domain}.enable")
                yield tab
    finally:
        process.terminate()
        await process.wait()
        if reading is not None:
            await reading
