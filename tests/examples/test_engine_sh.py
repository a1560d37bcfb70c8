# SPDX-License-Identifier: Apache-2.0
"""examples/one_box/engine.sh starts what its settings name, or reports the error in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ecshare.encoder.config import EncoderConfig
from ecshare.router.options.arguments import parse_arguments
from ecshare.store.config import parse
from kvshare.config import KVConfig
from tests.examples.scripts import ROUTER, VLLM, Box, Started
from tests.nightly import gate_tries

ENGINES = ("encode", "prefill", "decode", "plain")
EC = ("ECShareConnector", "ec_connector", "ec_role")
KV = ("KVShareConnector", "kv_connector", "kv_role")
# GPUs as Slurm and NVIDIA's device plug-ins name them.
DEVICES = ("5", "2,3", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-c6d4f1ef-42e4-5de3")


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def as_vllm(started: Started) -> Any:
    """Parse the engine's arguments as vLLM does; a misspelt option fails the assertion."""
    assert started.module == VLLM
    parser: Any = FlexibleArgumentParser  # has no types
    parser = AsyncEngineArgs.add_cli_args(parser())
    parsed, for_the_server = parser.parse_known_args(started.arguments[2:])
    host, port = started.one("--host"), started.one("--port")
    assert for_the_server == [
        f"--host={host}",
        f"--port={port}",
        "--enable-prompt-tokens-details",
    ]
    return parsed


def roles(started: Started) -> dict[str, str]:
    found = {}
    for name, connector, role in (EC, KV):
        config = started.connector(role[:2])
        if config is not None:
            assert config[connector] == name
            found[role[:2]] = config[role]
    return found


@pytest.mark.parametrize(
    ("stage", "port", "expected"),
    [
        ("encode", 8001, {"ec": "ec_producer"}),
        ("prefill", 8002, {"ec": "ec_consumer", "kv": "kv_both"}),
        ("decode", 8003, {"ec": "ec_consumer", "kv": "kv_both"}),
        ("plain", 8004, {}),
    ],
)
def test_stage_has_its_port_connectors_and_store(
    box: Box, stage: str, port: int, expected: dict[str, str]
) -> None:
    started = box.engine_sh(stage, MODEL="a/model", STORE="s3://bucket/prefix")
    parsed = as_vllm(started)
    assert parsed.model == "a/model"
    assert (started.one("--host"), started.one("--port")) == ("127.0.0.1", str(port))
    assert roles(started) == expected
    for kind, config in (("ec", EncoderConfig), ("kv", KVConfig)):
        if kind in expected:
            connector = started.connector(kind)
            assert connector is not None
            options = connector[f"{kind}_connector_extra_config"]
            assert parse(config, options, "engine.sh").url == "s3://bucket/prefix"
    has_cache_of_inputs = parsed.mm_processor_cache_gb != 0
    assert has_cache_of_inputs == (stage in ("encode", "plain"))


def test_the_store_is_a_folder_by_default(box: Box) -> None:
    connector = box.engine_sh("encode").connector("ec")
    assert connector is not None
    assert connector["ec_connector_extra_config"] == {"url": str(box.folder / "ecshare-store")}


@pytest.mark.parametrize("stage", gate_tries(*ENGINES, "router"))
@pytest.mark.parametrize("devices", DEVICES)
def test_given_devices_are_kept(box: Box, stage: str, devices: str) -> None:
    started = box.engine_sh(stage, DEVICE="cuda", CUDA_VISIBLE_DEVICES=devices)
    assert started.environment["CUDA_VISIBLE_DEVICES"] == devices


@pytest.mark.parametrize("stage", ENGINES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_given_devices_none_is_set(box: Box, stage: str, device: str) -> None:
    started = box.engine_sh(stage, DEVICE=device)
    assert "CUDA_VISIBLE_DEVICES" not in started.environment


def test_all_stages_listen_on_given_host(box: Box) -> None:
    for stage in (*ENGINES, "router"):
        assert box.engine_sh(stage, HOST="0.0.0.0").one("--host") == "0.0.0.0"


def test_port_setting_is_used_or_refused(box: Box) -> None:
    for stage in (*ENGINES, "router"):
        name = f"{stage.upper()}_PORT"
        assert box.engine_sh(stage, **{name: "9009"}).one("--port") == "9009"
        assert box.refused("engine.sh", stage, **{name: "tcp://10.0.0.1:8003"}) == (
            f"engine.sh: {name} must be a port number, not 'tcp://10.0.0.1:8003'"
        )


def test_router_has_local_engines_by_default(box: Box) -> None:
    started = box.engine_sh("router", HOST="0.0.0.0", DECODE_PORT="9003")
    assert started.module == ROUTER
    parsed = parse_arguments(started.arguments[2:])
    assert (parsed.host, parsed.port) == ("0.0.0.0", 8000)
    assert parsed.encoders == ("http://127.0.0.1:8001",)
    assert parsed.prefillers == ("http://127.0.0.1:8002",)
    assert parsed.decoders == ("http://127.0.0.1:9003",)


def test_router_has_engines_of_url_settings(box: Box) -> None:
    started = box.engine_sh(
        "router",
        ENCODE_URLS="http://e:8001",
        PREFILL_URLS="http://[::1]:8002  http://[::1]:8012",
        DECODE_URLS=" http://d-0:8003\nhttp://d-1:8003\n",
    )
    parsed = parse_arguments(started.arguments[2:])
    assert parsed.encoders == ("http://e:8001",)
    assert parsed.prefillers == ("http://[::1]:8002", "http://[::1]:8012")
    assert parsed.decoders == ("http://d-0:8003", "http://d-1:8003")


def test_urls_are_not_expanded_as_file_patterns(box: Box) -> None:
    (box.folder / "http:" / "h?:8001").parent.mkdir()
    (box.folder / "http:" / "h1:8001").touch()
    started = box.engine_sh("router", ENCODE_URLS="http:/h?:8001")
    assert started.all("--encoder") == ["http:/h?:8001"]


@pytest.mark.parametrize("nothing", ["", " \n"])
def test_empty_urls_omit_a_stage_but_not_decode(box: Box, nothing: str) -> None:
    router = box.engine_sh("router", ENCODE_URLS=nothing, PREFILL_URLS=nothing)
    parsed = parse_arguments(router.arguments[2:])
    assert (parsed.encoders, parsed.prefillers) == ((), ())
    assert parsed.decoders == ("http://127.0.0.1:8003",)
    for stage in ("prefill", "decode"):
        assert roles(box.engine_sh(stage, ENCODE_URLS=nothing)) == {"kv": "kv_both"}
        assert len(roles(box.engine_sh(stage, PREFILL_URLS=nothing))) == 2
    assert box.refused("engine.sh", "router", DECODE_URLS=nothing) == (
        "engine.sh: DECODE_URLS is empty: the router needs a decode engine"
    )


@pytest.mark.parametrize("stage", ENGINES)
def test_further_arguments_go_to_vllm_and_override_settings(box: Box, stage: str) -> None:
    further = ["--max-num-seqs=3", '--limit-mm-per-prompt={"image": 1}', "--seed", "7"]
    started = box.engine_sh(stage, *further, MAX_NUM_SEQS="5")
    assert started.arguments[-4:] == further
    parsed = as_vllm(started)
    assert (parsed.max_num_seqs, parsed.seed) == (3, 7)


def test_further_arguments_go_to_the_router(box: Box) -> None:
    parsed = parse_arguments(box.engine_sh("router", "--hand-over", "after").arguments[2:])
    assert parsed.hand_over == "after"


@pytest.mark.parametrize(
    "store", ['/st"ore', "/st\\ore", "/two words", "/two\nlines", "/$(false)`'", "/Bücher"]
)
def test_store_with_special_characters_arrives_unchanged(box: Box, store: str) -> None:
    started = box.engine_sh("prefill", STORE=store)
    for kind in ("ec", "kv"):
        connector = started.connector(kind)
        assert connector is not None
        assert connector[f"{kind}_connector_extra_config"] == {"url": store}


def test_options_and_store_both_reach_connectors(box: Box) -> None:
    options = {"integrity_key": "env:KEY", "wait_s": 2.5, "storage_options": {"anon": True}}
    given = json.dumps(options)
    started = box.engine_sh("decode", STORE="s3://bucket/a", OPTIONS=given, KEY="secret")
    for kind in ("ec", "kv"):
        connector = started.connector(kind)
        assert connector is not None
        assert connector[f"{kind}_connector_extra_config"] == {"url": "s3://bucket/a", **options}
    assert "secret" not in str(started.arguments)


def test_url_in_options_overrides_store(box: Box) -> None:
    started = box.engine_sh("encode", STORE="/a", OPTIONS='{"url": "/b"}')
    connector = started.connector("ec")
    assert connector is not None
    assert connector["ec_connector_extra_config"] == {"url": "/b"}


@pytest.mark.parametrize("stage", gate_tries("encode", "prefill", "decode"))
@pytest.mark.parametrize("options", ["{url: /a}", "{", "[]", '"text"', "1", "null"])
def test_options_that_are_no_object_are_refused(box: Box, stage: str, options: str) -> None:
    said = box.refused("engine.sh", stage, OPTIONS=options)
    assert said.startswith("engine.sh: OPTIONS must be a JSON object: ")


def test_settings_reach_vllm_on_any_device(box: Box) -> None:
    settings = {
        "TENSOR_PARALLEL_SIZE": "2",
        "GPU_MEMORY_UTILIZATION": "0.45",
        "MAX_MODEL_LEN": "32k",
        "MAX_NUM_SEQS": "64",
        "DTYPE": "bfloat16",
    }
    for device in ("cpu", "cuda"):
        parsed = as_vllm(box.engine_sh("decode", DEVICE=device, **settings))
        assert parsed.tensor_parallel_size == 2
        assert parsed.gpu_memory_utilization == 0.45
        assert parsed.max_model_len == 32_000
        assert parsed.max_num_seqs == 64
        assert parsed.dtype == "bfloat16"


def test_defaults_depend_on_device(box: Box) -> None:
    on_cpu = box.engine_sh("plain")
    parsed = as_vllm(on_cpu)
    assert (parsed.dtype, parsed.max_model_len, parsed.max_num_seqs) == ("float32", 4096, 8)
    assert parsed.enforce_eager
    assert on_cpu.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert on_cpu.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    on_gpu = box.engine_sh("plain", DEVICE="cuda")
    assert on_gpu.arguments[2:] == [
        *("--model=Qwen/Qwen2.5-VL-3B-Instruct", "--host=127.0.0.1", "--port=8004"),
        "--enable-prompt-tokens-details",
    ]
    assert on_gpu.environment == {}


@pytest.mark.parametrize(
    ("name", "value", "meaning"),
    [
        ("TENSOR_PARALLEL_SIZE", "two", "a whole number, at least 1"),
        ("TENSOR_PARALLEL_SIZE", "0", "a whole number, at least 1"),
        ("GPU_MEMORY_UTILIZATION", "45%", "a number above 0, at most 1"),
        ("GPU_MEMORY_UTILIZATION", "1.5", "a number above 0, at most 1"),
        ("MAX_MODEL_LEN", "long", "a number of tokens such as 8192 or 32k"),
        ("MAX_NUM_SEQS", "-1", "a whole number, at least 1"),
        ("DTYPE", "--help", "a type such as bfloat16"),
        ("DEVICE", "gpu", "cpu or cuda"),
    ],
)
def test_invalid_setting_is_refused(box: Box, name: str, value: str, meaning: str) -> None:
    said = box.refused("engine.sh", "decode", **{name: value})
    assert said == f"engine.sh: {name} must be {meaning}, not '{value}'"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["encoder"]])
def test_unknown_stage_is_refused(box: Box, arguments: list[str]) -> None:
    assert box.refused("engine.sh", *arguments) == (
        "engine.sh: the stage must be encode, prefill, decode, plain or router, "
        f"not '{' '.join(arguments)}'"
    )


def test_without_python_on_path_activation_is_advised(box: Box, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert box.refused("engine.sh", "encode", PATH=str(tmp_path / "empty")) == (
        "engine.sh: there is no python on PATH: activate the environment that has vLLM and ecshare"
    )
