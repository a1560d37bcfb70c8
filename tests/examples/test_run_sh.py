# SPDX-License-Identifier: Apache-2.0
"""examples/one_box/run.sh starts the stages of one machine, splits its GPUs, and ends with them."""

from pathlib import Path

import pytest

from tests.examples.scripts import PATIENCE_S, ROUTER, Box

ENCODE, PREFILL, DECODE, PORT_OF_ROUTER = 8001, 8002, 8003, 8000
UUIDS = [f"{kind}-8932f937-d72c-4106-c12f-20bd9faed9f{i}" for i, kind in enumerate(("GPU", "MIG"))]


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


@pytest.mark.parametrize(
    ("settings", "devices"),
    [
        ({}, ("0", "1", "2")),
        ({"TENSOR_PARALLEL_SIZE": "2"}, ("0,1", "2,3", "4,5")),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6"}, ("4", "5", "6")),
        ({"CUDA_VISIBLE_DEVICES": "4, 5, 6, 7"}, ("4", "5", "6")),
        ({"CUDA_VISIBLE_DEVICES": ",".join([*UUIDS, "GPU-0"])}, (*UUIDS, "GPU-0")),
        (
            {"CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2,1,0", "TENSOR_PARALLEL_SIZE": "2"},
            ("7,6", "5,4", "3,2"),
        ),
    ],
)
def test_devices_are_split_between_engines(
    box: Box, settings: dict[str, str], devices: tuple[str, str, str]
) -> None:
    with box.run_sh(4, DEVICE="cuda", **settings) as running:
        given = running.devices()
    del given[PORT_OF_ROUTER]
    assert given == dict(zip((ENCODE, PREFILL, DECODE), devices, strict=True))


def test_on_cpu_no_devices_are_set(box: Box) -> None:
    with box.run_sh(4) as running:
        assert set(running.devices().values()) == {None}


@pytest.mark.parametrize(
    ("settings", "num_needed", "num_given"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, 3, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 3, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "TENSOR_PARALLEL_SIZE": "2"}, 6, 4),
    ],
)
def test_too_few_devices_are_refused(
    box: Box, settings: dict[str, str], num_needed: int, num_given: int
) -> None:
    size = settings.get("TENSOR_PARALLEL_SIZE", "1")
    assert box.refused("run.sh", DEVICE="cuda", **settings) == (
        f"run.sh: 3 engines with TENSOR_PARALLEL_SIZE={size} need {num_needed} GPUs, but "
        f"CUDA_VISIBLE_DEVICES names {num_given}: name more, or start engine.sh on several hosts"
    )


def test_size_that_is_no_number_is_refused(box: Box) -> None:
    assert box.refused("run.sh", DEVICE="cuda", TENSOR_PARALLEL_SIZE="many") == (
        "run.sh: TENSOR_PARALLEL_SIZE must be a whole number, at least 1, not 'many'"
    )


def test_stages_with_url_settings_are_not_started(box: Box) -> None:
    settings = {"ENCODE_URLS": "", "PREFILL_URLS": "http://p:8002"}
    with box.run_sh(2, DEVICE="cuda", CUDA_VISIBLE_DEVICES="3", **settings) as running:
        assert set(running.started) == {DECODE, PORT_OF_ROUTER}
        assert running.devices()[DECODE] == "3"
        router = running.started[PORT_OF_ROUTER]
    assert router.all("--encoder") == []
    assert router.all("--prefiller") == ["http://p:8002"]
    assert router.all("--decoder") == ["http://127.0.0.1:8003"]


def test_with_public_host_engines_stay_on_loopback(box: Box) -> None:
    with box.run_sh(4, HOST="0.0.0.0") as running:
        hosts = {port: each.one("--host") for port, each in running.started.items()}
    assert hosts.pop(PORT_OF_ROUTER) == "0.0.0.0"
    assert set(hosts.values()) == {"127.0.0.1"}


def test_further_arguments_go_to_each_engine(box: Box) -> None:
    with box.run_sh(4, "--seed=7") as running:
        for each in running.started.values():
            assert each.all("--seed") == ([] if each.module == ROUTER else ["7"])


def test_when_one_program_ends_all_end(box: Box) -> None:
    with box.run_sh(4) as running:
        running.end(PREFILL)
        _, said = running.script.communicate(timeout=PATIENCE_S)
        assert running.script.returncode == 1
        for port in (ENCODE, DECODE, PORT_OF_ROUTER):
            assert running.has_ended(port)
    assert said.splitlines() == [
        f"prefill has ended, so all end; {box.folder}/ecshare-logs/prefill.log ends with:",
        "the stand-in was told to end",
    ]


def test_error_of_engine_sh_is_on_stderr_too(box: Box) -> None:
    with box.run_sh(0, OPTIONS="{") as running:
        _, said = running.script.communicate(timeout=PATIENCE_S)
    assert running.script.returncode == 1
    assert "engine.sh: OPTIONS must be a JSON object: " in said
