# SPDX-License-Identifier: Apache-2.0
"""The start of engines, for both connectors and the tier."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from ecshare.plugin.model_facts import Namespace
from ecshare.plugin.start import start_engine, start_with_namespace
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError
from ecshare.store.keys import Kind, manifest_key, namespace_digest
from ecshare.transfer.jobs import Lookup


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return StoreConfig(url=f"{tmp_path}/store", host_cache_dir=f"{tmp_path}/host")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [each for each in threading.enumerate() if each.name == "ecshare-io"]


def namespace_of(integrity: str) -> Namespace:
    return Namespace.of(Kind.KV, {"model": "m", "integrity": integrity})


def test_writer_stores_its_manifest_and_its_mark(config: StoreConfig) -> None:
    engine, namespace = start_with_namespace(
        config, "options", namespace_of, write=True, mark_of=lambda found: found.key("mark")
    )
    assert namespace == namespace_of("")
    keys = (manifest_key(namespace.kind, namespace.digest), namespace.key("mark"))
    engine.submit(Lookup(keys, 10, store_only=True))
    found = [done.value for done in engine.drain(10)]
    engine.close()
    assert found == [(True, True)]


def test_tenant_has_a_namespace_of_its_own_and_others_keep_theirs(config: StoreConfig) -> None:
    own = replace(config, tenant="acme")
    engine, namespace = start_with_namespace(own, "options", namespace_of, write=True)
    engine.close()
    assert namespace.facts == {**namespace_of("").facts, "tenant": "acme"}
    assert namespace.digest == namespace_digest(namespace.facts) != namespace_of("").digest
    assert (Path(config.url) / manifest_key(Kind.KV, namespace.digest)).exists()


@pytest.mark.parametrize(
    "start",
    [
        lambda config: start_engine(config, "options", write=True, device="cpu"),
        lambda config: start_with_namespace(config, "options", namespace_of, write=True),
    ],
)
def test_failed_start_on_an_unusable_store_leaves_no_thread(
    tmp_path: Path, start: Callable[[StoreConfig], object]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s"}
    config = StoreConfig(
        url="s3://bucket/prefix", storage_options=options, host_cache_dir=f"{tmp_path}/host"
    )
    with pytest.raises(ConfigError, match="cannot be used"):
        start(config)


def test_failed_start_without_a_namespace_leaves_no_thread(config: StoreConfig) -> None:
    def fails(_: str) -> Namespace:
        raise ConfigError("no such layout")

    with pytest.raises(ConfigError, match="no such layout"):
        start_with_namespace(config, "options", fails, write=True)
