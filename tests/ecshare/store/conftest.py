# SPDX-License-Identifier: Apache-2.0
"""Real S3 servers, one of each for the whole run; every test gets a prefix of its own."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ecshare.store.config import StoreConfig
from ecshare.testing.s3 import BUCKET, Rclone, SeaweedFS


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


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with SeaweedFS(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield Bucket(server.base_url, server.storage_options)


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with Rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield Bucket(server.base_url, server.storage_options)
