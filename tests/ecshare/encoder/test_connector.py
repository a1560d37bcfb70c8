# SPDX-License-Identifier: Apache-2.0
"""The connector class: options, roles, registration."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import ECTransferConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs

from ecshare.connector import ECShareConnector
from ecshare.plugin.register import register
from ecshare.store.errors import ConfigError


@pytest.fixture(scope="module")
def vllm_config(vlm: Path) -> VllmConfig:
    return EngineArgs(model=str(vlm), dtype="float32", enforce_eager=True).create_engine_config()


def connect(vllm_config: VllmConfig, options: dict[str, Any]) -> ECShareConnector:
    vllm_config.ec_transfer_config = ECTransferConfig(
        ec_connector="ECShareConnector",
        ec_role="ec_producer",
        ec_connector_extra_config=options,
    )
    connector = ECConnectorFactory.create_connector(vllm_config, ECConnectorRole.SCHEDULER)
    assert isinstance(connector, ECShareConnector)
    return connector


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()
    register()  # vLLM may call it twice


def test_register_makes_both_connectors_known_by_name() -> None:
    assert KVConnectorFactory.get_connector_class_by_name("KVShareConnector") is not None


def test_scheduler_process_creates_no_worker_half(vllm_config: VllmConfig, tmp_path: Path) -> None:
    connector = connect(
        vllm_config, {"url": str(tmp_path / "store"), "host_cache_dir": str(tmp_path / "host")}
    )
    assert not hasattr(connector, "worker")
    connector.shutdown()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["url"]),
        ({"url": 7}, ["url"]),
        ({"url": "/s", "urll": "/s"}, ["urll", "url"]),
        ({"url": "/s", "wait_s": "long"}, ["wait_s"]),
        ({"url": "/s", "wait_s": -1}, ["wait_s"]),
        ({"url": "nosuch://bucket"}, ["url", "nosuch"]),
        ({"url": "relative/folder"}, ["url", "absolute"]),
        ({"url": "/proc/ecshare"}, ["url"]),
    ],
)
def test_config_error_names_the_path_of_the_option(
    vllm_config: VllmConfig, tmp_path: Path, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(vllm_config, {"host_cache_dir": str(tmp_path / "host"), **options})
    assert "ec_connector_extra_config" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_unreachable_bucket_is_a_config_error_without_secrets(
    vllm_config: VllmConfig, tmp_path: Path
) -> None:
    options = {
        "url": "s3://bucket",
        "storage_options": {
            "key": "k",
            "secret": "not-for-the-log",
            "endpoint_url": "http://127.0.0.1:9",
        },
        "io_timeout_s": 2,
        "host_cache_dir": str(tmp_path / "host"),
    }
    with pytest.raises(ConfigError, match=r"ec_connector_extra_config\.url") as caught:
        connect(vllm_config, options)
    assert "not-for-the-log" not in str(caught.value)
