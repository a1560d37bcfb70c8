# SPDX-License-Identifier: Apache-2.0
"""An engine whose options cannot work does not start, and its log says why in one sentence."""

import json
from pathlib import Path

import pytest

from lab.servers.engines import ec_argument, kv_argument
from lab.servers.processes import ServerFailed
from tests.conftest import StartEngine

pytestmark = pytest.mark.engine


def test_engine_with_impossible_options_does_not_start(engine: StartEngine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    host = str(tmp_path / "host")
    dead_s3 = {"key": "k", "secret": "not-for-the-log", "endpoint_url": "http://127.0.0.1:9"}
    mistyped = engine("mistyped", ec_argument("consumer", str(tmp_path / "store"), wait=3))
    unreachable = engine(
        "unreachable",
        kv_argument(
            "both", "s3://bucket", storage_options=dead_s3, host_cache_dir=host, io_timeout_s=2
        ),
    )
    unwritable = engine(
        "unwritable", ec_argument("producer", f"{tmp_path}/file/store", host_cache_dir=host)
    )
    children = [
        {
            "kv_connector": "KVShareConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"url": f"{tmp_path}/{name}", "host_cache_dir": host},
        }
        for name in ("near", "far")
    ]
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    doubled = engine("doubled", f"--kv-transfer-config={json.dumps(several)}")
    for refused, option in (
        (mistyped, "ec_connector_extra_config.wait"),
        (unreachable, "kv_connector_extra_config.url"),
        (unwritable, "ec_connector_extra_config.url"),
        (doubled, "kv_connector_extra_config.connectors"),
    ):
        with pytest.raises(ServerFailed, match="ended while starting"):
            refused.wait_ready()
        lines = refused.log_path.read_text().splitlines()
        said = [line for line in lines if f"ConfigError: {option}" in line]
        assert said
        # vLLM itself logs all its arguments; our own lines must not show secrets.
        assert not any("not-for-the-log" in line for line in said)
