# SPDX-License-Identifier: Apache-2.0
"""Real S3 servers on this machine: SeaweedFS and rclone, from wheels that hold the programs."""

import json
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.servers.processes import LOOPBACK, Port, Server, program

BUCKET = "ecshare"
ACCESS_KEY = "ecshare-test"
SECRET_KEY = "ecshare-test-secret"
# Further ports of `weed mini`. By default they are fixed numbers, or those plus 10000, so that two
# servers on one machine would conflict.
SIDE_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port.grpc",
)
GRPC_OFFSET = 10_000
SOCKETS = Path("/tmp")  # weed puts its local sockets here and ignores TMPDIR


class SeaweedFS(Server):
    """An S3 server with one empty bucket and one pair of keys, ready in about a second.

    It verifies signatures and supports create-only puts. Its data is in a temporary folder, which
    `stop` removes; a stopped server cannot be started again, a killed one can.
    """

    ready_within_s = 30.0

    def __init__(
        self,
        log_dir: str | Path,
        name: str = "seaweedfs",
        policies: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare the server. `policies`: of further users, who may do what these IAM policies
        (JSON) allow; by the user's name, which is access key and secret key too."""
        super().__init__(name, log_dir)
        self.folder = Path(tempfile.mkdtemp(prefix="ecshare-s3-"))
        self._users = self.folder / "users.json" if policies else None
        if self._users:
            self._users.write_text(json.dumps(_users(policies or {})))
        self._side_ports = {option: Port() for option in SIDE_PORTS}
        self._side_ports |= dict(
            zip(("admin.port", "admin.port.grpc"), _admin_ports(), strict=True)
        )

    @property
    def url(self) -> str:
        """Return `s3://bucket/prefix`, for the connectors' option `url`."""
        return f"s3://{BUCKET}/cache"

    @property
    def storage_options(self) -> dict[str, Any]:
        """Return the options with which s3fs and the connectors (`storage_options`) reach it."""
        return {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": self.base_url}

    @property
    def health_url(self) -> str:
        """Return the url of the bucket in the filer. The bucket is created last, half a second
        after S3 is up.
        """
        return f"http://{LOOPBACK}:{self._side_ports['filer.port'].number}/buckets/{BUCKET}/"

    def _answers(self) -> bool:
        # After a restart it has the bucket before S3 listens.
        try:
            socket.create_connection((LOOPBACK, self.port.number)).close()
        except OSError:
            return False
        return super()._answers()

    def command(self) -> list[str]:
        """Return `weed mini`: all of SeaweedFS in one process, with S3 services only."""
        return [
            *(program("weed"), "mini", f"-dir={self.folder}", f"-bucket={BUCKET}"),
            *(f"-ip={LOOPBACK}", f"-ip.bind={LOOPBACK}", f"-s3.port={self.port.number}"),
            *(f"-{option}={port.number}" for option, port in self._side_ports.items()),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"),
            "-master.telemetry=false",
            *([f"-s3.config={self._users}"] if self._users else ()),
        ]

    def environment(self) -> Mapping[str, str]:
        """Return the keys that the server accepts."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }

    def enforce_quota(self, num_megabytes: int) -> None:
        """Set the bucket's quota, and compare what it has now with that.

        A bucket with more becomes read-only, and takes objects again after a comparison that finds
        less. The server answers 500 to a PUT then; objects can be removed. By itself it compares
        only now and then.
        """
        http = {each: self._side_ports[f"{each}.port"].number for each in ("master", "filer")}
        grpc = {each: self._side_ports[f"{each}.port.grpc"].number for each in http}
        places = (f"-{each}={LOOPBACK}:{http[each]}.{grpc[each]}" for each in http)
        commands = (
            "lock",
            f"s3.bucket.quota -name={BUCKET} -op=set -sizeMB={num_megabytes}",
            "s3.bucket.quota.enforce -apply",
            "unlock\n",
        )
        shell = [program("weed"), "shell", *places]
        subprocess.run(shell, input="\n".join(commands), text=True, check=True, capture_output=True)

    def stop(self) -> None:
        """End the server and remove its data."""
        super().stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        for port in (self.port, *self._side_ports.values()):
            port.release()
            for left_over in SOCKETS.glob(f"seaweedfs-*-{port.number}.sock"):
                left_over.unlink(missing_ok=True)


class Rclone(Server):
    """Another S3 server, to check what clients may rely on.

    It ignores create-only puts, and answers a ranged GET with the whole object. Its data is in a
    temporary folder, which `stop` removes; a stopped server cannot be started again.
    """

    ready_within_s = 30.0

    def __init__(self, log_dir: str | Path, name: str = "rclone") -> None:
        super().__init__(name, log_dir)
        self.folder = Path(tempfile.mkdtemp(prefix="ecshare-rclone-"))
        (self.folder / "root" / BUCKET).mkdir(parents=True)

    @property
    def url(self) -> str:
        """Return `s3://bucket/prefix`, for the connectors' option `url`."""
        return f"s3://{BUCKET}/cache"

    @property
    def storage_options(self) -> dict[str, Any]:
        """Return the options with which s3fs and the connectors (`storage_options`) reach it."""
        return {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": self.base_url}

    def command(self) -> list[str]:
        """Return `rclone serve s3`, with a configuration of its own instead of the user's."""
        return [
            *(program("rclone"), "serve", "s3", str(self.folder / "root")),
            *("--addr", f"{LOOPBACK}:{self.port.number}"),
            *("--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"),
            *("--config", str(self.folder / "no-configuration")),
        ]

    def _answers(self) -> bool:
        # No url answers 200 without a signature.
        try:
            socket.create_connection((LOOPBACK, self.port.number)).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        """End the server and remove its data."""
        super().stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.port.release()


def _users(policies: Mapping[str, str]) -> dict[str, Any]:
    """Return weed's configuration of one user who may do all, and one for each policy."""
    keys = {ACCESS_KEY: SECRET_KEY} | {name: name for name in policies}
    more: dict[str, Any] = {name: {"policyNames": [name]} for name in policies}
    return {
        "identities": [
            {"name": name, "credentials": [{"accessKey": name, "secretKey": secret}]}
            | more.get(name, {"actions": ["Admin"]})
            for name, secret in keys.items()
        ],
        "policies": [{"name": name, "content": text} for name, text in policies.items()],
    }


def _admin_ports() -> tuple[Port, Port]:
    """Return two ports as weed's worker expects them despite its options: gRPC 10000 above HTTP."""
    while True:
        http = Port()
        try:
            return http, Port(http.number + GRPC_OFFSET)
        except (OSError, OverflowError):
            http.release()
