# SPDX-License-Identifier: Apache-2.0
"""Which fields clients of a real engine may set, and the effect of malformed transfer params."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ecshare.store.integrity import TOKEN_HEADER, router_token
from lab.servers.engines import EngineProcess, kv_argument
from tests.conftest import StartEngine
from tests.engines.chat import Answer, picture, text

pytestmark = pytest.mark.engine

KEY = "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2"
QUESTION = text("what is to be seen here?")


@pytest.fixture(scope="module")
def guarded(engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> EngineProcess:
    root = tmp_path_factory.mktemp("guarded")
    return engine(
        "guarded",
        kv_argument("both", str(root / "store"), host_cache_dir=str(root / "host")),
        "--middleware=ecshare.plugin.gate.RouterGate",
        environment={"ECSHARE_ROUTER_KEY": key_file(root)},
    ).wait_ready()


def key_file(folder: Path) -> str:
    (folder / "router.key").write_text(KEY + "\n")
    return f"file:{folder}/router.key"


def ask(engine: EngineProcess, content: list[dict[str, Any]], token: str, **fields: Any) -> Answer:
    body = {"model": engine.model, "messages": [{"role": "user", "content": content}]}
    request = urllib.request.Request(
        f"{engine.base_url}/v1/chat/completions",
        json.dumps(body | {"max_tokens": 4, "temperature": 0} | fields).encode(),
        {"Content-Type": "application/json", TOKEN_HEADER: token},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return Answer(response.status, json.load(response))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, json.load(error))


def test_uuids_and_transfer_params_need_the_router_token(guarded: EngineProcess) -> None:
    token = router_token(KEY.encode())
    assert ask(guarded, [picture(1), QUESTION], "").status == 200
    refused = ask(guarded, [picture(1, "somebody-elses"), QUESTION], KEY)
    assert refused.status == 400
    assert "`uuid` is not accepted" in refused.body["error"]["message"]
    assert ask(guarded, [picture(2, "the-routers"), QUESTION], token).status == 200
    refused = ask(guarded, [QUESTION], "", kv_transfer_params={"kvshare": {"num_tokens": 1}})
    assert refused.status == 400


@pytest.mark.parametrize("params", [484, "x", [1], True, {}, {"kvshare": 484}, {"kvshare": [1]}])
def test_malformed_transfer_params_fail_only_their_request(
    guarded: EngineProcess, params: Any
) -> None:
    token = router_token(KEY.encode())
    odd = ask(guarded, [QUESTION], token, vllm_xargs={"kv_transfer_params": params})
    assert odd.status in {200, 400, 500}
    assert ask(guarded, [QUESTION], "").status == 200
