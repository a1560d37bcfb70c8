# SPDX-License-Identifier: Apache-2.0
"""Real S3 servers, one of each for the whole run; every test gets a prefix of its own."""

import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ecshare.store.config import StoreConfig
from ecshare.testing.processes import LOOPBACK, Server, program
from ecshare.testing.s3 import BUCKET, SeaweedFS


@dataclass(frozen=True)
class Bucket:
    """A bucket on a running server."""

    endpoint: str
    storage_options: dict[str, Any]

    def config(self, url: str = "", **options: Any) -> StoreConfig:
        """Options of a store of one's own in it; `options` replace single storage options."""
        return StoreConfig(
            url=url or f"s3://{BUCKET}/{uuid.uuid4().hex}/cache",
            storage_options={**self.storage_options, **options},
        )


class Rclone(Server):
    """`rclone serve s3`: ignores create-only puts, answers a ranged GET with the whole object."""

    KEY, SECRET = "ecshare-rclone", "ecshare-rclone-secret"

    def __init__(self, folder: Any) -> None:
        super().__init__("rclone", folder)
        self.folder = folder

    def command(self) -> list[str]:
        (self.folder / "root" / BUCKET).mkdir(parents=True)
        return [
            *(program("rclone"), "serve", "s3", str(self.folder / "root")),
            *(
                "--addr",
                f"{LOOPBACK}:{self.port.number}",
                "--auth-key",
                f"{self.KEY},{self.SECRET}",
            ),
            *("--config", str(self.folder / "none")),
        ]

    def _answers(self) -> bool:
        # It has no page that answers 200 without a signature.
        try:
            socket.create_connection((LOOPBACK, self.port.number)).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        super().stop()
        self.port.release()


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with SeaweedFS(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield Bucket(server.base_url, server.storage_options)


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with Rclone(tmp_path_factory.mktemp("rclone")) as server:
        keys = {"key": server.KEY, "secret": server.SECRET, "endpoint_url": server.base_url}
        yield Bucket(server.base_url, keys)
