# SPDX-License-Identifier: Apache-2.0
"""SGLang's embedding store over ours: it fits the interface, and nothing in a store can hurt it."""

import importlib.util
import inspect
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ecshare.store.errors import ConfigError
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal
from ecshare.store.keys import is_object_key
from lab.servers.s3 import SeaweedFS
from tests.contrib import sglang_interface

SOURCE = Path(__file__).parents[2] / "contrib" / "sglang" / "ecshare_embedding_store.py"
DIM = 64
Make = Callable[..., Any]
HOSTILE = ["../../etc/passwd", "a/../b", "/abs", "x\x00y", "\udc80", "", "a" * 100_000, ".gap", "é"]


class Node:
    """A host of SGLang: a store and the registered pool into which it is told to read."""

    def __init__(self, store: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        self.store = store
        self.pool = torch.zeros(64, DIM, dtype=dtype)
        self.row = DIM * self.pool.element_size()
        store.register_buffer(self.pool)

    def place(self, *rows: int) -> list[int]:
        return [self.pool.data_ptr() + row * self.row for row in rows]

    def fill(self, row: int, num_rows: int, seed: int) -> torch.Tensor:
        drawn = torch.randn(num_rows, DIM, generator=torch.Generator().manual_seed(seed))
        self.pool[row : row + num_rows] = drawn.to(self.pool.dtype)
        return self.pool[row : row + num_rows].clone()


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    return sglang_interface.install(monkeypatch)


@pytest.fixture
def backend(base: type[Any]) -> type[Any]:
    """Return our class, loaded from its file as SGLang would load a module of its own."""
    spec = importlib.util.spec_from_file_location("ecshare_embedding_store", SOURCE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: type[Any] = module.ECShareEmbeddingStore
    return found


@pytest.fixture
def make(backend: type[Any], tmp_path: Path) -> Iterator[Make]:
    made: list[Any] = []

    def make(**options: Any) -> Any:
        made.append(backend({"model": "m", "url": f"{tmp_path}/store", **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def objects(tmp_path: Path) -> list[Path]:
    root = tmp_path / "store"
    return [each for each in root.rglob("*") if is_object_key(str(each.relative_to(root)))]


def saved(node: Node, name: str = "h", seed: int = 1) -> torch.Tensor:
    content = node.fill(0, 4, seed)
    assert node.store.batch_put([name], node.place(0), [4 * node.row]) == [True]
    return content


def test_it_fits_their_interface(base: type[Any], backend: type[Any]) -> None:
    assert issubclass(backend, base)
    assert not backend.__abstractmethods__
    for name, parameters in sglang_interface.ABSTRACT.items():
        assert tuple(inspect.signature(getattr(backend, name)).parameters) == ("self", *parameters)
    assert tuple(inspect.signature(backend.register_buffer).parameters) == ("self", "tensor")


def test_their_factory_makes_it_from_the_environment(
    backend: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"model": "m", "url": f"{tmp_path}/store"}
    monkeypatch.setenv("ECSHARE_EMBEDDING_STORE", json.dumps(options))
    store = backend()
    assert store.batch_is_exist(["x"]) == [False]
    store.close()


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "{}", '{"model": ""}', '{"model": "m"}', '{"model": "m", "rul": "/x"}']
)
def test_wrong_options_are_named(
    backend: type[Any], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("ECSHARE_EMBEDDING_STORE", text)
    with pytest.raises(ConfigError, match="ECSHARE_EMBEDDING_STORE"):
        backend()


def check_round_trip(writer: Node, reader: Node) -> None:
    whole, split = writer.fill(0, 3, 1), writer.fill(10, 5, 2)
    assert writer.store.batch_put(["a"], writer.place(0), [3 * writer.row]) == [True]
    runs, sizes = [writer.place(10, 12)], [[2 * writer.row, 3 * writer.row]]
    assert writer.store.batch_put_from_multi_buffers(["b"], runs, sizes) == [True]
    assert reader.store.batch_is_exist(["a", "none", "b"]) == [True, False, True]
    got = reader.store.batch_get(["none", "a"], reader.place(20, 30), [3 * reader.row] * 2)
    assert got == [False, True]
    assert torch.equal(reader.pool[30:33], whole)
    assert not reader.pool[20:23].any()
    runs, sizes = [reader.place(50, 40)], [[reader.row, 4 * reader.row]]  # other pages than there
    assert reader.store.batch_get_into_multi_buffers(["b"], runs, sizes) == [True]
    assert torch.equal(torch.cat([reader.pool[50:51], reader.pool[40:44]]), split)


def test_another_host_loads_what_was_stored(make: Make) -> None:
    check_round_trip(Node(make()), Node(make()))


@pytest.mark.s3
def test_another_host_loads_it_from_a_bucket(make: Make, seaweed: SeaweedFS) -> None:
    options = {"url": f"{seaweed.url}/sglang", "storage_options": seaweed.storage_options}
    check_round_trip(Node(make(**options)), Node(make(**options)))


def test_what_differs_is_not_shared(make: Make) -> None:
    saved(Node(make()))
    key = "k" * 32
    others = [{"model": "n"}, {"epoch": "2"}, {"tenant": "t"}, {"integrity_key": key}]
    nodes = [Node(make(**each)) for each in others] + [Node(make(), torch.float16)]
    for node in nodes:
        assert node.store.batch_is_exist(["h"]) == [False]
        assert node.store.batch_get(["h"], node.place(0), [4 * node.row]) == [False]


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "empty", "header"])
def test_damaged_object_is_a_miss_and_the_next_save_replaces_it(
    make: Make, tmp_path: Path, damage: str
) -> None:
    writer, reader = Node(make()), Node(make())
    content = saved(writer)
    (file,) = objects(tmp_path)
    body = bytearray(file.read_bytes())
    body[PROLOGUE_BYTES if damage == "flipped" else 9] ^= (
        1 if damage in ("flipped", "header") else 0
    )
    ends = {"short": -1, "empty": 0}
    file.chmod(0o600)
    file.write_bytes(body[: ends.get(damage)] + (b"x" if damage == "long" else b""))
    where, sizes = reader.place(0), [4 * reader.row]
    assert reader.store.batch_get(["h"], where, sizes) == [False]
    assert not reader.pool.any()
    assert reader.store.batch_is_exist(["h"]) == [False]  # so that SGLang encodes and saves
    reader.pool[:4] = content
    assert reader.store.batch_put(["h"], where, sizes) == [True]
    reader.pool.zero_()
    assert reader.store.batch_get(["h"], where, sizes) == [True]
    assert torch.equal(reader.pool[:4], content)


def test_intact_object_of_another_key_size_or_type_is_a_miss(make: Make, tmp_path: Path) -> None:
    writer, reader = Node(make()), Node(make())
    saved(writer, "victim")
    (victim,) = objects(tmp_path)
    saved(writer, "other", seed=2)
    (other,) = set(objects(tmp_path)) - {victim}
    key = str(victim.relative_to(tmp_path / "store"))
    num_values = 4 * DIM
    forged = [
        TensorSpec("F16", (num_values,)),
        TensorSpec("BF16", (4, DIM)),
        TensorSpec("BF16", (num_values,), {"x": 1}),
        TensorSpec("BF16", (num_values - 1,)),
    ]
    bodies = [other.read_bytes()]
    for spec in forged:
        body = bytearray(PROLOGUE_BYTES + spec.num_bytes)
        seal(memoryview(body), spec, key)
        bodies.append(bytes(body))
    victim.chmod(0o600)
    for forgery in bodies:
        victim.write_bytes(forgery)
        assert Node(make()).store.batch_get(["victim"], reader.place(0), [4 * reader.row]) == [
            False
        ]
        assert not reader.pool.any()


def test_object_without_our_mac_is_a_miss(make: Make, tmp_path: Path) -> None:
    node = Node(make(integrity_key="k" * 32))
    saved(node)
    (file,) = objects(tmp_path)
    key = str(file.relative_to(tmp_path / "store"))
    body = bytearray(PROLOGUE_BYTES + 4 * node.row)
    seal(memoryview(body), TensorSpec("BF16", (4 * DIM,)), key)
    file.chmod(0o600)
    file.write_bytes(body)
    assert node.store.batch_get(["h"], node.place(0), [4 * node.row]) == [False]


def test_hostile_hashes_stay_apart_and_below_the_root(make: Make, tmp_path: Path) -> None:
    node = Node(make())
    contents = {name: saved(node, name, seed) for seed, name in enumerate(HOSTILE)}
    assert len(objects(tmp_path)) == len(HOSTILE)
    assert {each.name for each in tmp_path.iterdir()} == {"store"}
    for name, content in contents.items():
        assert node.store.batch_get([name], node.place(8), [4 * node.row]) == [True]
        assert torch.equal(node.pool[8:12], content)
    for no_text in (None, 7, b"h", ["h"]):
        assert node.store.batch_is_exist([no_text, HOSTILE[0]]) == [False, True]


def test_places_outside_the_pool_are_refused(make: Make) -> None:
    node = Node(make())
    saved(node)
    start, size = node.pool.data_ptr(), 4 * node.row
    end = start + node.pool.numel() * 2
    before = node.pool.clone()
    for ptr in (0, -1, start - 1, end, end - size + 1, 1 << 70, "x", None):
        assert node.store.batch_get(["h"], [ptr], [size]) == [False]
        assert node.store.batch_put(["new"], [ptr], [size]) == [False]
    for wrong in (0, -1, 1, size - 1, 1 << 62, 1.5, None):
        assert node.store.batch_get(["h"], [start], [wrong]) == [False]
    parts = [[start, start]], [[2 * size, -size]]
    assert node.store.batch_get_into_multi_buffers(["h"], *parts) == [False]
    assert torch.equal(node.pool, before)
    with pytest.raises(ValueError, match=r"zip\(\)"):
        node.store.batch_get(["h", "i"], [start], [size])
    with pytest.raises(ValueError, match="contiguous"):
        node.store.register_buffer(node.pool[:, ::2])
    with pytest.raises(ValueError, match="the same"):
        node.store.register_buffer(node.pool.float())


def test_oversize_is_refused(make: Make) -> None:
    node = Node(make(buffer_bytes=4 * 4 * DIM * 2))
    assert node.store.batch_put(["fits"], node.place(0), [4 * node.row]) == [True]
    assert node.store.batch_put(["large"], node.place(0), [5 * node.row]) == [False]


def test_nothing_is_shared_before_a_pool_is_registered(make: Make) -> None:
    store = make()
    assert store.batch_is_exist(["h"]) == [False]
    assert store.batch_get(["h"], [1], [2]) == [False]


@pytest.mark.parametrize("url", ["http", "folder"])
def test_failing_store_costs_hits_not_calls(make: Make, tmp_path: Path, url: str) -> None:
    options: dict[str, Any] = {"io_timeout_s": 0.5, "wait_s": 0.5}
    if url == "http":  # nobody listens there
        options |= {
            "url": "s3://bucket/x",
            "storage_options": {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"},
        }
    node = Node(make(**options))
    if url == "folder":
        saved(node)
        (file,) = objects(tmp_path)
        file.unlink()
        file.mkdir()  # where an object should be
    began_s = time.monotonic()
    for _ in range(6):
        assert node.store.batch_get(["h"], node.place(0), [4 * node.row]) == [False]
    assert node.store.batch_put(["h"], node.place(0), [4 * node.row]) == [False]
    assert time.monotonic() - began_s < 7 * 1.5
