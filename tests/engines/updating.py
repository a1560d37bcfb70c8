# SPDX-License-Identifier: Apache-2.0
"""Updates of the weights of running engines, as trainers do them."""

import json
import urllib.request
from pathlib import Path

import pytest

from ecshare.cli import main
from lab.servers.engines import EngineProcess
from lab.servers.processes import LOOPBACK

DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
"""The environment of engines that can be updated."""


def begin_epoch(store: str) -> None:
    """Run `ecshare epoch next`, which waits until engines have read it."""
    with pytest.raises(SystemExit) as ended:
        main(["epoch", "next", store])
    assert ended.value.code == 0


def update(engine: EngineProcess, weights: Path) -> None:
    """Give an engine other weights, and reset its caches."""
    post(engine, "pause?mode=abort&clear_cache=false")
    post(
        engine,
        "collective_rpc",
        {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}},
    )
    assert post(engine, "reset_prefix_cache")["success"]
    post(engine, "reset_encoder_cache")
    post(engine, "resume")


def post(engine: EngineProcess, path: str, body: object = None) -> dict[str, object]:
    """Return an engine's answer to a POST."""
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{engine.port.number}/{path}",
        json.dumps(body).encode() if body is not None else b"",
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.loads(answer.read() or b"{}"))
