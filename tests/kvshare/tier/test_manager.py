# SPDX-License-Identifier: Apache-2.0
"""KVShareTier below vLLM's own tiering manager: round trips, namespaces, options and metrics."""

import contextlib
import gc
import importlib
import itertools
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.config import OffloadingGroupConfig
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from ecshare.store.errors import ConfigError
from lab.servers.s3 import SeaweedFS
from tests.ecshare.upkeep.stores import taken
from tests.expiry import expire, renew_often, wait_until_there
from tests.kvshare.tier.offloading import (
    BLOCK_BYTES,
    OffloadingHost,
    content,
    key,
    offloading_config,
    tier_options,
)

HIT, MISS = LookupResult.HIT, LookupResult.MISS
StartHost = Callable[..., OffloadingHost]


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "folder":
        return {"url": f"file://{tmp_path}/store"}
    server: SeaweedFS = request.getfixturevalue("seaweed")
    return {"url": f"{server.url}/{tmp_path.name}", "storage_options": server.storage_options}


@pytest.fixture
def folder(tmp_path: Path) -> dict[str, Any]:
    return {"url": f"file://{tmp_path}/store"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartHost]:
    """Start an engine's offloading on a host of its own; `changes`: see `offloading_config`."""
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def start(
            store: dict[str, Any],
            host: str = "",
            *,
            tier: dict[str, Any] | None = None,
            **changes: Any,
        ) -> OffloadingHost:
            folder = tmp_path / (host or f"host-{next(numbers)}")
            options = tier_options(store, folder, **(tier or {}))
            started = OffloadingHost(offloading_config(options, **changes))
            stack.callback(started.close)
            return started

        yield start


def test_loaded_chunks_count_as_used(
    start: StartHost, folder: dict[str, Any], tmp_path: Path
) -> None:
    one, two = start(folder), start(folder)
    one.offload([1, 2, 3])
    one.rest()
    assert two.find([1, 2]) == [HIT, HIT]
    names = {path.name for path in (tmp_path / "store" / "kv" / "2").rglob("*") if path.is_file()}
    used = taken(two.tier.engine.uses)
    assert [(age, position) for _, age, position in used] == [(0, 1), (0, 2)]
    assert {str(name).rpartition("/")[2] for name, _, _ in used} < names
    assert taken(one.tier.engine.uses) == []


def test_chunks_are_loaded_on_another_host(start: StartHost, store: dict[str, Any]) -> None:
    one, two = start(store), start(store)
    one.offload([1, 2, 3])
    one.rest()
    assert one.count("chunks/saved") == 3
    assert two.find([1, 2, 3, 4]) == [HIT, HIT, HIT, MISS]
    assert [two.read(number) for number in (1, 2, 3)] == [content(number) for number in (1, 2, 3)]
    assert (two.count("chunks/loaded"), two.count("chunks/missed")) == (3, 1)
    assert two.count("transfer_bytes/read/store") == 3 * BLOCK_BYTES


def test_chunks_outlive_the_engine_that_stored_them(
    start: StartHost, folder: dict[str, Any], tmp_path: Path
) -> None:
    """The storing engine is a process of its own, which ends right after its last step."""
    program = (
        "import json, logging, sys\n"
        "from tests.kvshare.tier.offloading import OffloadingHost, offloading_config\n"
        "logging.getLogger('vllm').addHandler(logging.StreamHandler())\n"
        "logging.getLogger('vllm').setLevel(logging.INFO)\n"
        "logging.getLogger().setLevel(logging.ERROR)\n"
        "host = OffloadingHost(offloading_config(json.loads(sys.argv[1])))\n"
        "logging.getLogger('kvshare.tier').warning('a message of the tier')\n"
        "host.offload([1, 2, 3])\n"
        "host.close()\n"
    )
    options = tier_options(folder, tmp_path / "other")
    command = [sys.executable, "-c", program, json.dumps(options)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "a message of the tier" in ran.stderr, "the tier must log through vLLM's handlers"
    host = start(folder)
    assert host.find([1, 2, 3]) == [HIT] * 3
    assert [host.read(number) for number in (1, 2, 3)] == [content(number) for number in (1, 2, 3)]


def test_chunks_that_the_cpu_tier_evicted_are_loaded(
    start: StartHost, folder: dict[str, Any]
) -> None:
    host = start(folder, num_chunks=4)
    for first in range(0, 16, 4):
        host.offload(range(first, first + 4))
        host.rest()
        host.finish("storing")
    assert host.find([0, 1, 2, 3]) == [HIT] * 4
    assert [host.read(number) for number in range(4)] == [content(number) for number in range(4)]


def test_groups_with_equal_hashes_have_separate_chunks(
    start: StartHost, folder: dict[str, Any]
) -> None:
    one, two = start(folder), start(folder)
    one.offload([1])
    one.rest()
    context = two.request("loading")
    other_group = key(1, group=1)
    two.step_until(lambda: two.manager.lookup(other_group, context) is not LookupResult.RETRY)
    assert two.manager.lookup(other_group, context) is MISS


def test_engines_of_a_host_read_from_its_cache(start: StartHost, folder: dict[str, Any]) -> None:
    one, two = start(folder, "shared"), start(folder, "shared")
    one.offload([1])
    one.rest()
    assert two.find([1]) == [HIT]
    assert two.read(1) == content(1)
    assert two.count("transfer_bytes/read/store") == 0
    assert two.count("transfer_bytes/read/host") == BLOCK_BYTES


def test_later_request_finds_chunks_stored_since(start: StartHost, folder: dict[str, Any]) -> None:
    one, two = start(folder), start(folder)
    assert two.find([1], "early") == [MISS]
    one.offload([1])
    one.rest()
    assert two.find([1], "early") == [MISS], "the result for a request is final"
    assert two.find([1], "late") == [HIT]


def test_results_of_a_finished_request_are_removed(
    start: StartHost, folder: dict[str, Any]
) -> None:
    """vLLM may reuse the request's name."""
    host, other = start(folder), start(folder)
    name = Name("request")
    reference = weakref.ref(name)
    assert host.find([1, 2], name) == [MISS] * 2
    host.finish(name)
    other.offload([1])
    other.rest()
    assert host.find([1, 2], name) == [HIT, MISS]
    host.read(1, name)
    host.rest()
    host.finish(name)
    del name
    gc.collect()
    assert reference() is None, "the tier still refers to the request"


class Name(str):
    """A request id that supports weak references."""

    __slots__ = ("__weakref__",)


# --- namespaces ---


def namespaces(tmp_path: Path) -> set[str]:
    """Return the namespaces that have a manifest in the store."""
    return {path.name for path in (tmp_path / "store" / "kv/2/manifests").iterdir()}


OTHER_GROUPS = (OffloadingGroupConfig(16, ("layer.0", "layer.2"), 0),)
INTEGRITY_KEY = "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2"


@pytest.mark.parametrize(
    "changes",
    [
        {"model__dtype": "float16"},
        {"cache__tokens_per_hash": 8},
        {"groups": OTHER_GROUPS},
        {"kv_cache_layout": "LBNHC"},
        {"canonical_layout": True},
        {"replicated_layout": True},
        {"parallel__tp_size": 2},
        {"parallel__pp_size": 2},
        {"parallel__pcp_size": 2},
        {"parallel__dcp_size": 2},
        {"parallel__world_size": 2},
        {"worker_kv_bytes_per_block": 2 * BLOCK_BYTES},
        {"worker_kv_bytes_per_block": BLOCK_BYTES // 2, "cache__blocks_per_chunk": 2},
        {"model": "another model"},
        {"tier": {"epoch": "another"}},
        {"tier": {"integrity_key": INTEGRITY_KEY}},
    ],
    ids=str,
)
def test_engines_with_other_facts_have_another_namespace(
    start: StartHost, folder: dict[str, Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    one, two = start(folder), start(folder, **changes)
    assert len(namespaces(tmp_path)) == 2
    one.offload([1])
    one.rest()
    assert two.find([1]) == [MISS]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"engine_id": f"another-{os.getpid()}"}, id="engine_id"),
        {"parallel__data_parallel_index": 1},
        {"parallel__data_parallel_size": 2},
        {"num_chunks": 8},
        {"enable_kv_cache_events": True},
    ],
    ids=str,
)
def test_settings_that_do_not_change_bytes_keep_the_namespace(
    start: StartHost, folder: dict[str, Any], changes: dict[str, Any]
) -> None:
    one, two = start(folder), start(folder, **changes)
    one.offload([1])
    one.rest()
    assert two.find([1]) == [HIT]
    assert two.read(1) == content(1)


def test_other_weights_in_a_folder_of_the_same_name_have_another_namespace(
    start: StartHost, folder: dict[str, Any], vlm: Path, other_vlm: Path, tmp_path: Path
) -> None:
    from ecshare.plugin.model_facts import weights_fingerprint

    for weights in (vlm, other_vlm):
        model = tmp_path / "model"
        model.symlink_to(weights)
        weights_fingerprint.cache_clear()  # a process normally has one model only
        start(folder, model=str(model))
        model.unlink()
    assert len(namespaces(tmp_path)) == 2


def test_other_vllm_releases_and_devices_have_another_namespace(
    start: StartHost, folder: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(folder)
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    start(folder)
    monkeypatch.setattr("vllm.platforms.current_platform.device_name", "another")
    start(folder)
    assert len(namespaces(tmp_path)) == 3


# --- start, metrics, end ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epoch": ""}, r"secondary_tiers\.KVShareTier\.epoch: missing.*revision"),
        ({"urll": "/x"}, r"secondary_tiers\.KVShareTier\.urll: unknown option"),
        ({"locality": "HERE"}, r"secondary_tiers\.KVShareTier\.locality"),
        ({"url": "file:///proc/no/such/folder"}, r"secondary_tiers\.KVShareTier\.url"),
    ],
)
def test_wrong_option_stops_the_engine_with_an_error_that_names_it(
    start: StartHost, folder: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        start(folder, tier=options, engine_id=f"wrong-{os.getpid()}")
    assert not Path(f"/dev/shm/vllm_offload_wrong-{os.getpid()}.mmap").exists()


def test_locality_option_becomes_vllms_locality(start: StartHost, folder: dict[str, Any]) -> None:
    host = start(folder, tier={"locality": "REMOTE"})
    assert host.tier.locality is not None
    assert (host.tier.locality.value, start(folder).tier.locality) == ("REMOTE", None)


def test_every_count_is_a_metric_defined_for_vllm(start: StartHost, folder: dict[str, Any]) -> None:
    host = start(folder)
    config = host.spec.extra_config
    definitions = OffloadingSpecFactory.get_spec_cls(config).build_metric_definitions(dict(config))
    ours = {name for name in definitions if name.startswith("kvshare_tier_")}
    assert "kvshare_tier_chunks" in ours
    host.offload([1])
    host.rest()
    host.find([1, 2])
    stats = host.manager.get_stats()
    assert stats is not None
    reported = {name: values for name, values in stats.data["data"].items() if name in ours}
    assert reported["kvshare_tier_chunks"] == {("saved",): 1, ("missed",): 1}
    for name, values in reported.items():
        assert all(len(labels) == len(definitions[name].labelnames) for labels in values)


def test_manifest_is_renewed_before_it_expires(
    start: StartHost, folder: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew_often(monkeypatch)
    start(folder)
    wait_until_there(expire(tmp_path / "store"))


def test_shutdown_releases_vllms_memory(
    start: StartHost, folder: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    host = start(folder)
    host.offload([1])
    host.find([2, 3])
    region = host.manager.primary_tier._mmap_region.mmap_obj
    assert region is not None
    host.close()
    assert region.closed, "the tier still has a view of it"
    host.tier.shutdown()  # a second call changes nothing


def test_import_error_without_vllms_tiers_explains_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_left_out(module: str) -> bool:
        return module.startswith(("kvshare.tier", "vllm.v1.kv_offload.tiering"))

    for module in filter(is_left_out, tuple(sys.modules)):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.tiering", None)
    importlib.import_module("kvshare.connector")
    with pytest.raises(ImportError, match="is for the tiers of vLLM's OffloadingConnector"):
        importlib.import_module("kvshare.tier")
