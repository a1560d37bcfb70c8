# SPDX-License-Identifier: Apache-2.0
"""Object stores on loopback, one of each for the whole run; every test gets its own prefix."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from ecshare.store.config import StoreConfig
from lab.servers.s3 import BUCKET, Rclone, SeaweedFS
from tests.bad_s3 import server as bad_s3
from tests.bad_s3.server import BadS3, Reply, Request, honest, refused
from tests.conftest import CACHE
from tests.ecshare.store.azurite import (
    ACCOUNT,
    CONTAINER,
    OTHER_ACCOUNT,
    Azurite,
    NoNpmError,
    installed,
)


@dataclass(frozen=True)
class Bucket:
    """A bucket on a running server."""

    endpoint: str
    storage_options: dict[str, Any]

    def config(self, url: str = "", **options: Any) -> StoreConfig:
        """Return options of a new store in it; `options` replace single storage options."""
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


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    try:
        program = installed(CACHE)
    except NoNpmError as exc:
        pytest.skip(str(exc))
    with Azurite(program, tmp_path_factory.mktemp("azurite")) as server:
        for account in (ACCOUNT, OTHER_ACCOUNT):
            server.make_container(account)
        yield server


def azure_config(azurite: Azurite, url: str = "", **options: Any) -> StoreConfig:
    """Return options of a new store on it; `options` replace single storage options."""
    return StoreConfig(
        url=url or f"az://{CONTAINER}/{uuid.uuid4().hex}/cache",
        storage_options={**azurite.storage_options(), **options},
    )


def as_google(request: Request) -> Reply | None:
    """Answer as Google's XML API does where it differs from S3's: no package has an emulator."""
    if urlsplit(request.path).path.split("/")[1] != bad_s3.BUCKET:
        return refused(404, "NoSuchBucket")
    if request.verb == "delete" and request.stored is None:
        return refused(404, "NoSuchKey")
    reply = honest(request)
    if "ETag" not in reply.headers:
        return reply
    no_md5 = f'{reply.headers["ETag"][:-1]}-1"'
    return replace(reply, headers={**reply.headers, "ETag": no_md5, "x-goog-generation": "1"})


@pytest.fixture
def gcs() -> Iterator[BadS3]:
    with bad_s3.bad_s3(as_google) as server:
        yield server


def gcs_config(gcs: BadS3, url: str = "", **options: Any) -> StoreConfig:
    """Return options of a store on it; `options` replace single storage options."""
    return StoreConfig(
        url=url or f"gs://{bad_s3.BUCKET}/a/cache",
        storage_options={"endpoint_url": gcs.endpoint, "token": "anon", **options},
    )
