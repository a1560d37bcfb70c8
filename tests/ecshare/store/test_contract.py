# SPDX-License-Identifier: Apache-2.0
"""The contract suite over every back end. The gate runs those that differ the most."""

import errno
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.fsspec.store import FsspecStore, open_fsspec
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store
from ecshare.testing import StoreContract
from tests.bad_s3.server import BadS3
from tests.ecshare.store.azurite import Azurite
from tests.ecshare.store.conftest import Bucket, azure_config, gcs_config


class TestMemory(StoreContract):
    one_winner = False  # fsspec checks existence, then writes
    states_md5 = False

    @pytest.fixture
    async def store(self) -> AsyncIterator[ObjectStore]:
        store = open_store(StoreConfig(url=f"memory://{uuid.uuid4().hex}/cache"), "options")
        yield store
        await store.close()


class TestDirectory(StoreContract):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[ObjectStore]:
        store = open_store(StoreConfig(url=f"file://{tmp_path}/new/store"), "options")
        yield store
        await store.close()


class TestDirectoryWithoutHardLinks(StoreContract):
    """A folder as on vfat and some network file systems."""

    one_winner = creates_once = False

    @pytest.fixture
    async def store(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[ObjectStore]:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
        store = open_store(StoreConfig(url=str(tmp_path)), "options")
        yield store
        await store.close()


class TestFilesThroughFsspec(StoreContract):
    """A filesystem of files like sftp and smb, where a move makes writes atomic."""

    create_only = one_winner = creates_once = states_md5 = False

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[ObjectStore]:
        (tmp_path / "cache").mkdir()
        store = open_fsspec(StoreConfig(url=f"file://{tmp_path}/cache"), "options")
        yield store
        await store.close()


@pytest.mark.s3
class TestS3ThroughObstore(StoreContract):
    @pytest.fixture
    async def store(self, seaweedfs: Bucket) -> AsyncIterator[ObjectStore]:
        store = open_store(seaweedfs.config(), "options")
        assert not isinstance(store, FsspecStore)
        yield store
        await store.close()


@pytest.mark.s3
class TestS3ThroughS3fs(StoreContract):
    @pytest.fixture
    async def store(self, seaweedfs: Bucket) -> AsyncIterator[ObjectStore]:
        # Only s3fs has this option, so the store is opened through fsspec.
        store = open_store(seaweedfs.config(s3_additional_kwargs={}), "options")
        assert isinstance(store, FsspecStore)
        yield store
        await store.close()


@pytest.mark.nightly
@pytest.mark.s3
class TestRcloneThroughObstore(StoreContract):
    create_only = one_winner = False
    racing_writers_fail = True  # "500 Internal Error", also where they race to make one folder

    @pytest.fixture
    async def store(self, rclone: Bucket) -> AsyncIterator[ObjectStore]:
        store = open_store(rclone.config(), "options")
        yield store
        await store.close()


@pytest.mark.nightly
@pytest.mark.s3
class TestRcloneThroughS3fs(StoreContract):
    create_only = one_winner = False
    racing_writers_fail = True  # "500 Internal Error", also where they race to make one folder

    @pytest.fixture
    async def store(self, rclone: Bucket) -> AsyncIterator[ObjectStore]:
        store = open_store(rclone.config(s3_additional_kwargs={}), "options")
        assert isinstance(store, FsspecStore)
        yield store
        await store.close()


@pytest.mark.nightly
@pytest.mark.azure
class TestAzureThroughObstore(StoreContract):
    states_md5 = False

    @pytest.fixture
    async def store(self, azurite: Azurite) -> AsyncIterator[ObjectStore]:
        store = open_store(azure_config(azurite), "options")
        assert not isinstance(store, FsspecStore)
        yield store
        await store.close()


@pytest.mark.nightly
class TestGoogleThroughObstore(StoreContract):
    """Tested with an imitation of its XML API, not with Google's own service."""

    states_md5 = False

    @pytest.fixture
    async def store(self, gcs: BadS3) -> AsyncIterator[ObjectStore]:
        store = open_store(gcs_config(gcs), "options")
        assert not isinstance(store, FsspecStore)
        yield store
        await store.close()
