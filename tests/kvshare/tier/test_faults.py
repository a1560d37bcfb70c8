# SPDX-License-Identifier: Apache-2.0
"""A failing store costs vLLM's own offloading hits, but no waits, errors or wrong bytes."""

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import LookupResult

from ecshare.store.errors import ConfigError
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal
from ecshare.store.keys import Kind, object_key
from ecshare.transfer.device.staging import Staging, slab_bytes
from lab.faults.tcp_proxy import Proxy
from lab.servers.processes import LOOPBACK
from lab.servers.s3 import SeaweedFS
from tests.bad_s3.faults import modes, on
from tests.bad_s3.server import BUCKET, bad_s3
from tests.kvshare.damage import empty, flip_a_payload_bit, replace, truncate
from tests.kvshare.gated import GatedFileSystem
from tests.kvshare.tier.offloading import (
    BLOCK_BYTES,
    OffloadingHost,
    content,
    key,
    offloading_config,
    tier_options,
)

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
PENDING = LookupResult.HIT_PENDING
NUMBERS = [1, 2, 3]
CPU_CHUNKS = 8
Start = Callable[..., OffloadingHost]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start offloading on a host of its own, by default with a folder as the store."""
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> OffloadingHost:
            store = {"url": f"file://{tmp_path}/store"}
            tier = tier_options(store, tmp_path / f"host-{next(numbers)}", **options)
            started = OffloadingHost(offloading_config(tier, num_chunks=CPU_CHUNKS))
            stack.callback(started.close)
            return started

        yield start


@pytest.fixture
def gated(start: Start) -> Iterator[Callable[..., OffloadingHost]]:
    """Start offloading with a store whose operations a test can block."""

    def begin(**options: Any) -> OffloadingHost:
        return start(url="gated://bucket", **options)

    yield begin
    GatedFileSystem.open_gates()


@pytest.fixture(autouse=True)
def _fresh_gates() -> None:
    GatedFileSystem.reset()


def is_idle(host: OffloadingHost) -> bool:
    """Return whether all of the CPU tier can be refilled: no slot is held for a transfer."""
    prepared = host.manager.prepare_store(
        [key(number) for number in range(1000, 1000 + CPU_CHUNKS)], host.request("filling")
    )
    if prepared is None:
        return False
    host.manager.complete_store(prepared.keys_to_store, host.request("filling"), success=False)
    return True


def look_up(host: OffloadingHost, numbers: list[int]) -> None:
    """Look chunks up until the store has answered, without loading them."""
    context = host.request("loading")
    host.step_until(lambda: RETRY not in [host.tier.lookup(key(n), context) for n in numbers])


# --- nothing waits for the store ---


def test_no_hook_waits_for_a_look_up(gated: Start) -> None:
    host = gated()
    GatedFileSystem.close_gate("exists")
    assert host.ask(NUMBERS) == [RETRY] * 3
    host.step()
    assert host.ask(NUMBERS) == [RETRY] * 3
    GatedFileSystem.open_gates()
    assert host.find(NUMBERS) == [MISS] * 3


def test_hanging_store_holds_no_slot_of_the_cpu_tier(gated: Start) -> None:
    host = gated()
    GatedFileSystem.close_gate("put")
    host.offload(NUMBERS)
    host.step_until(lambda: not host.manager.has_pending_work())
    assert host.count("chunks/saved") == 0
    assert is_idle(host)
    GatedFileSystem.open_gates()
    host.rest()
    assert host.count("chunks/saved") == 3
    assert gated().find(NUMBERS) == [HIT] * 3


def test_no_hook_waits_for_a_load(gated: Start) -> None:
    host = gated()
    host.offload(NUMBERS)
    host.rest()
    other = gated()
    GatedFileSystem.close_gate("get")
    other.step_until(lambda: other.ask(NUMBERS) == [PENDING] * 3)
    other.step()
    assert other.ask(NUMBERS) == [PENDING] * 3
    GatedFileSystem.open_gates()
    assert other.find(NUMBERS) == [HIT] * 3
    assert [other.read(number) for number in NUMBERS] == [content(number) for number in NUMBERS]


def test_reset_cancels_loads_that_wait_for_the_store(gated: Start) -> None:
    host = gated()
    host.offload(NUMBERS)
    host.rest()
    other = gated()
    GatedFileSystem.close_gate("get", "put")
    other.offload([7])
    other.step_until(lambda: other.ask(NUMBERS) == [PENDING] * 3)
    other.step()
    assert other.manager.has_pending_work()
    other.reset()
    assert not other.manager.has_pending_work()
    assert is_idle(other)
    assert other.find(NUMBERS) == [MISS] * 3, "a request whose chunks were lost computes them"
    GatedFileSystem.open_gates()
    assert other.find(NUMBERS, "later") == [HIT] * 3


def test_shutdown_does_not_wait_for_loads(gated: Start) -> None:
    host = gated()
    host.offload(NUMBERS)
    host.rest()
    other = gated()
    GatedFileSystem.close_gate("get")
    other.step_until(lambda: other.ask(NUMBERS) == [PENDING] * 3)
    other.step()
    closing = threading.Thread(target=other.close)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_shutdown_waits_for_saves(gated: Start) -> None:
    """This includes chunks that the last step left in the CPU tier."""
    host = gated()
    host.offload(NUMBERS)
    host.close()
    assert gated().find(NUMBERS) == [HIT] * 3


def test_pending_saves_are_bounded_by_buffer_bytes(gated: Start) -> None:
    """Two chunks fit into the buffer."""
    buffer_bytes = 2 * slab_bytes(PROLOGUE_BYTES + BLOCK_BYTES)
    host = gated(buffer_bytes=buffer_bytes)
    GatedFileSystem.close_gate("put")
    host.offload([1, 2, 3, 4])
    host.step_until(lambda: not host.manager.has_pending_work())
    assert host.count("chunks/dropped") == 2
    assert 0 < host.count("save_queue_bytes") <= buffer_bytes
    GatedFileSystem.open_gates()
    host.rest()
    assert host.count("chunks/saved") == 2
    host.offload([5])
    host.rest()
    assert host.count("chunks/saved") == 3


def test_requests_that_wait_share_one_query(gated: Start) -> None:
    host = gated()
    GatedFileSystem.close_gate("exists")
    for request in ("a", "b"):
        assert host.ask(NUMBERS, request) == [RETRY] * 3
    host.step()
    assert host.ask(NUMBERS, "c") == [RETRY] * 3
    host.step()
    host.finish("a")
    GatedFileSystem.open_gates()
    assert host.find(NUMBERS, "b") == host.find(NUMBERS, "c") == [MISS] * 3
    assert host.count("chunks/missed") == 3, "the store was queried once for each"


# --- a store that fails ---


def test_missing_store_costs_hits_and_is_used_again_once_it_is_back(
    start: Start, tmp_path: Path
) -> None:
    host = start()
    host.offload([1])
    host.rest()
    folder, away = tmp_path / "store", tmp_path / "away"
    folder.rename(away)
    folder.touch()
    other_request = "during the outage"
    assert host.find([8, 9], other_request) == [MISS, MISS]
    host.offload([2, 3])
    host.rest()
    assert host.count("chunks/failed") == 4
    assert is_idle(host)
    folder.unlink()
    away.rename(folder)
    host.step_until(lambda: not host.is_breaker_open())
    host.offload([4])
    host.rest()
    assert start().find([1, 4]) == [HIT, HIT]


def test_store_that_fails_during_a_load_costs_hits(gated: Start) -> None:
    host = gated()
    host.offload(NUMBERS)
    host.rest()
    other = gated()
    GatedFileSystem.broken.add("get")
    assert other.find(NUMBERS) == [MISS] * 3
    assert other.count("chunks/failed") == 3
    assert is_idle(other)
    GatedFileSystem.broken.clear()
    other.step_until(lambda: not other.is_breaker_open())
    assert other.find(NUMBERS, "later") == [HIT] * 3
    assert [other.read(number) for number in NUMBERS] == [content(number) for number in NUMBERS]


@pytest.mark.s3
def test_store_that_stops_answering_costs_hits(
    start: Start, seaweed: SeaweedFS, tmp_path: Path
) -> None:
    """From between look-ups and loads on it accepts every packet and answers none."""
    with Proxy(LOOPBACK, seaweed.port.number) as proxy:
        options = dict(seaweed.storage_options, endpoint_url=proxy.url)
        store = {"url": f"{seaweed.url}/{tmp_path.name}", "storage_options": options}
        limits = {"wait_s": 1.0, "io_timeout_s": 1.0}
        one = start(**store)
        one.offload(NUMBERS)
        one.rest()
        host = start(**store, **limits)
        look_up(host, NUMBERS)
        proxy.stall()
        assert host.find(NUMBERS) == [MISS] * 3
        assert host.find([8, 9]) == [MISS] * 2
        host.offload([5, 6])
        host.rest()
        assert host.count("chunks/failed") == 7
        assert is_idle(host)
        proxy.resume()


@pytest.mark.parametrize(
    "fault", ["503", "403", "missing", "cut", "cut-by-reset", "stall", "flipped"]
)
def test_failed_download_is_a_miss(start: Start, fault: str) -> None:
    with bad_s3() as server:
        store = {"url": f"s3://{BUCKET}/x", "storage_options": server.storage_options}
        one = start(**store)
        one.offload(NUMBERS)
        one.rest()
        host = start(**store, wait_s=1.0, io_timeout_s=1.0)
        server.faults = {"get": on("kv/", modes(f"get:{fault}")["get"])}
        assert host.find(NUMBERS) == [MISS] * 3
        assert server.num_hits
        assert is_idle(host)
        server.faults = {}
        host.step_until(lambda: not host.is_breaker_open())
        host.offload(NUMBERS, "computed")
        assert host.find(NUMBERS, "computed") == [HIT] * 3


# --- hostile objects ---


def path_of(number: int, tmp_path: Path) -> Path:
    """Return the path of the only stored chunk of that number."""
    namespace = "0" * 32
    in_any_namespace = object_key(Kind.KV, namespace, key(number)).replace(namespace, "*")
    (path,) = (tmp_path / "store").glob(in_any_namespace)
    return path


def sealed(path: Path, facts: TensorSpec) -> memoryview:
    """Return a valid object with these facts, under the key that belongs to `path`."""
    slab = Staging(torch.device("cpu"), 1 << 20).reserve(facts)
    assert slab is not None
    slab.payload.zero_()
    seal(slab.body, facts, str(path).partition("/store/")[2])
    return slab.body


def swap_in_another_chunk(path: Path) -> None:
    other = next(one for one in path.parents[1].glob("??/*") if one != path)
    replace(path, other.read_bytes())


def make_it_smaller(path: Path) -> None:
    replace(path, sealed(path, TensorSpec("U8", (BLOCK_BYTES - 1,))))


def make_it_larger(path: Path) -> None:
    replace(path, sealed(path, TensorSpec("U8", (BLOCK_BYTES + 1,))))


def give_it_another_dtype(path: Path) -> None:
    replace(path, sealed(path, TensorSpec("BF16", (BLOCK_BYTES // 2,))))


FAULTS = [
    Path.unlink,
    flip_a_payload_bit,
    truncate,
    empty,
    swap_in_another_chunk,
    make_it_smaller,
    make_it_larger,
    give_it_another_dtype,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_object_is_a_miss_and_its_neighbours_are_loaded(
    start: Start, tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    one = start()
    one.offload(NUMBERS)
    one.rest()
    host = start()
    # Damage it between look-up and load: the look-up would already report a missing object.
    look_up(host, NUMBERS)
    fault(path_of(2, tmp_path))
    assert host.find(NUMBERS) == [HIT, MISS, HIT]
    assert [host.read(1), host.read(3)] == [content(1), content(3)]
    assert host.count("chunks/failed") == 1
    assert host.count("chunks/loaded") == 2
    # The chunk is computed and stored again, and is valid from then on.
    host.offload([2], "computed")
    host.rest()
    other = start()
    assert other.find(NUMBERS) == [HIT] * 3
    assert [other.read(number) for number in NUMBERS] == [content(number) for number in NUMBERS]


def test_objects_without_a_valid_mac_are_misses(start: Start, tmp_path: Path) -> None:
    """An attacker with write access to the bucket copies them to the keys of this namespace."""
    one, host = start(), start(integrity_key=os.urandom(32).hex())
    one.offload([1])
    one.rest()
    theirs = path_of(1, tmp_path)
    body = theirs.read_bytes()
    namespaces = [each.name for each in (tmp_path / "store/kv/2/manifests").iterdir()]
    namespaces.remove(theirs.parts[-3])
    path = theirs.parents[2].joinpath(*namespaces, *theirs.parts[-2:])
    path.parent.mkdir(parents=True)
    path.write_bytes(body)
    assert host.find([1]) == [MISS]
    make_it_smaller(path) if path.exists() else path.write_bytes(
        sealed(path, TensorSpec("U8", (BLOCK_BYTES,)))
    )
    assert host.find([1], "later") == [MISS]


@pytest.mark.s3
def test_server_that_refuses_at_start_is_a_config_error(start: Start, seaweed: SeaweedFS) -> None:
    options = dict(seaweed.storage_options, key="nobody")
    with pytest.raises(ConfigError, match=r"secondary_tiers\.KVShareTier\.url"):
        start(url=seaweed.url, storage_options=options)
