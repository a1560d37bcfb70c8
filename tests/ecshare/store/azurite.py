# SPDX-License-Identifier: Apache-2.0
"""A real server of Azure's blob API: Azurite, from npm, installed once into .cache."""

import base64
import fcntl
import hashlib
import hmac
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Mapping
from email.utils import formatdate
from pathlib import Path
from typing import Any

from lab.servers.processes import LOOPBACK, Server

VERSION = "3.37.0"
ACCOUNT = "ecsharetest"
OTHER_ACCOUNT = "ecshareother"
KEY = base64.b64encode(b"ecshare-test-key").decode()
CONTAINER = "ecshare"


class NoNpmError(Exception):
    """Azurite cannot be installed; the message says why."""


def installed(cache: Path) -> Path:
    """Return the program, installed if necessary. NoNpmError: it cannot be installed."""
    folder = cache / f"azurite-{VERSION}"
    program = folder / "node_modules/azurite/dist/src/blob/main.js"
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise NoNpmError("Azurite needs Node.js and npm, which are not installed")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "azurite.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.is_file():
            temporary = folder.with_suffix(".new")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            npm = ("npm", "install", "--no-audit", "--no-fund", "--omit=dev", "--ignore-scripts")
            ran = subprocess.run(
                [*npm, f"--prefix={temporary}", f"azurite@{VERSION}"],
                capture_output=True,
                text=True,
            )
            if ran.returncode:
                raise NoNpmError(f"npm could not install Azurite: {ran.stderr.strip()[-300:]}")
            temporary.rename(folder)
    return program


class Azurite(Server):
    """Azure's blob API on loopback, with two accounts; objects are kept in memory."""

    def __init__(self, program: Path, log_dir: Path) -> None:
        super().__init__("azurite", log_dir)
        self._program = program

    def command(self) -> list[str]:
        """Disable telemetry, and accept API versions that it does not know yet."""
        return [
            *("node", str(self._program), "--blobHost", LOOPBACK),
            *("--blobPort", str(self.port.number), "--silent"),
            *("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"),
        ]

    def environment(self) -> Mapping[str, str]:
        """Set up the two accounts."""
        return {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY};{OTHER_ACCOUNT}:{KEY}"}

    def _answers(self) -> bool:
        try:
            socket.create_connection((LOOPBACK, self.port.number)).close()
        except OSError:
            return False
        return True

    def endpoint(self, account: str = ACCOUNT) -> str:
        """Return the endpoint of an account."""
        return f"{self.base_url}/{account}"

    def storage_options(self, account: str = ACCOUNT) -> dict[str, Any]:
        """Return options as adlfs takes them, which reaches other servers by connection string."""
        fields = {
            "DefaultEndpointsProtocol": "http",
            "AccountName": account,
            "AccountKey": KEY,
            "BlobEndpoint": self.endpoint(account),
        }
        text = ";".join(f"{name}={value}" for name, value in fields.items())
        return {"connection_string": text}

    def make_container(self, account: str) -> None:
        """Make CONTAINER with a request signed by hand: no installed client can do it."""
        date, version = formatdate(usegmt=True), "2021-12-02"
        signed = (
            f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n"
            f"/{account}/{account}/{CONTAINER}\nrestype:container"
        )
        digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        headers = {
            "x-ms-date": date,
            "x-ms-version": version,
            "Content-Length": "0",
            "Authorization": f"SharedKey {account}:{base64.b64encode(digest).decode()}",
        }
        url = f"{self.endpoint(account)}/{CONTAINER}?restype=container"
        asked = urllib.request.Request(url, method="PUT", headers=headers)
        urllib.request.urlopen(asked, timeout=30).close()
