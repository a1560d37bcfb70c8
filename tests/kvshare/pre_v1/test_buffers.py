# SPDX-License-Identifier: Apache-2.0
"""The buffers from before V1: on a folder, on S3, in one process and in many."""

import errno
import json
import os
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ecshare.store.errors import ConfigError, StoreUnavailable
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal
from ecshare.store.keys import Key
from ecshare.store.objects import Buffer, ObjectStore, Sink
from ecshare.store.open import open_store
from kvshare.pre_v1.buffers import KVLookupBuffer, KVStoreBuffer
from kvshare.pre_v1.index import NAMES, EntryName
from lab.servers.s3 import Rclone, SeaweedFS
from tests.conftest import LOGS

TOKENS = list(range(100, 140))
INTEGRITY_KEY = "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2"


@pytest.fixture(params=["folder", pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.nightly])])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "folder":
        return {"url": str(tmp_path / "store")}
    server: SeaweedFS = request.getfixturevalue("seaweed")
    return {"url": f"{server.url}/{tmp_path.name}", "storage_options": server.storage_options}


@pytest.fixture
def folder(tmp_path: Path) -> dict[str, Any]:
    return {"url": str(tmp_path / "store")}


class Watched:
    """An ObjectStore whose calls a test can observe and change."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.before: dict[str, Callable[[Sequence[Key]], None]] = {}
        """By method name: called with the keys before that method, and may raise."""
        self.sinks: Callable[[Key, Sink], Sink] = lambda _, sink: sink
        """Returns the sink that `get` uses in place of the given one."""
        self.entries = ""
        """The prefix of the keys of entries; empty before the first entry."""

    def __getattr__(self, name: str) -> Any:
        """Return the store's own attribute."""
        return getattr(self._store, name)

    def is_entry(self, key: Key) -> bool:
        """Return whether the key belongs to an entry, not to a marker."""
        return bool(self.entries) and key.startswith(self.entries)

    def _call_before(self, call: str, keys: Sequence[Key]) -> None:
        if call in self.before:
            self.before[call](keys)

    async def get(self, key: Key, sink: Sink) -> None:
        self._call_before("get", [key])
        await self._store.get(key, self.sinks(key, sink))

    async def put(self, key: Key, body: Buffer, *, replace: bool = False) -> bool:
        if not self.entries and key.startswith("kv/") and "-" in key:
            self.entries = key[: len("kv/2/") + 33]
        return await self._store.put(key, body, replace=replace)

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        self._call_before("exists", keys)
        return await self._store.exists(keys)

    async def delete(self, keys: Sequence[Key]) -> None:
        self._call_before("delete", keys)
        await self._store.delete(keys)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """The stores of the buffers that a test opens, in order of opening."""
    stores: list[Watched] = []

    def open_watched(*arguments: Any) -> Watched:
        stores.append(Watched(open_store(*arguments)))
        return stores[-1]

    monkeypatch.setattr("kvshare.pre_v1.buffers.open_store", open_watched)
    return stores


Open = Callable[..., Any]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open a buffer of a class; it is closed at the end."""
    buffers = []

    def opened(kind: type[Any], options: dict[str, Any], **more: Any) -> Any:
        buffers.append(kind(options, **more))
        return buffers[-1]

    yield opened
    for buffer in buffers:
        buffer.close()


# --- a dictionary of tensors ---


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12, dtype=torch.float32).view(3, 4),
        torch.randn(2, 3, 5).to(torch.bfloat16).transpose(0, 2),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.empty(0, 4),
    ],
)
def test_tensor_round_trips(opened: Open, folder: dict[str, Any], tensor: Tensor) -> None:
    opened(KVStoreBuffer, folder).put("a key", tensor)
    found = opened(KVStoreBuffer, folder).get("a key")
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)


def test_putting_again_replaces_and_none_deletes(opened: Open, options: dict[str, Any]) -> None:
    buffer = opened(KVStoreBuffer, options)
    assert buffer.get("key") is None
    for value in (1.0, 2.0):
        buffer.put("key", torch.full((3,), value))
        assert torch.equal(buffer.get("key"), torch.full((3,), value))
    buffer.put("key", None)
    buffer.put("key", None)
    assert buffer.get("key") is None
    assert buffer.counters == {"missing": 2, "stored": 2, "found": 2, "deleted": 2}


@pytest.mark.parametrize("key", ["", "../../evil", "/etc/passwd", "x" * 100_000, "\ud800\0ä"])
def test_any_text_is_a_key(opened: Open, folder: dict[str, Any], tmp_path: Path, key: str) -> None:
    buffer = opened(KVStoreBuffer, folder)
    buffer.put(key, torch.ones(2))
    assert torch.equal(buffer.get(key), torch.ones(2))
    assert buffer.get(key + "x") is None
    assert {path.name for path in tmp_path.iterdir()} == {"store"}


def test_buffers_with_other_names_epochs_tenants_or_integrity_keys_are_separate(
    opened: Open, folder: dict[str, Any]
) -> None:
    opened(KVStoreBuffer, folder).put("key", torch.ones(1))
    assert opened(KVStoreBuffer, folder, name="other").get("key") is None
    assert opened(KVStoreBuffer, folder | {"epoch": "2"}).get("key") is None
    assert opened(KVStoreBuffer, folder | {"tenant": "acme"}).get("key") is None
    assert opened(KVStoreBuffer, folder | {"integrity_key": INTEGRITY_KEY}).get("key") is None


def test_damaged_tensor_is_missing_and_can_be_replaced(
    opened: Open, folder: dict[str, Any], tmp_path: Path
) -> None:
    buffer = opened(KVStoreBuffer, folder)
    buffer.put("key", torch.ones(100))
    (path,) = (tmp_path / "store").rglob("kv/2/*/*/*")
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.unlink()
    path.write_bytes(body)
    assert buffer.get("key") is None
    assert buffer.counters["corrupt"] == 1
    buffer.put("key", torch.ones(100))
    assert torch.equal(buffer.get("key"), torch.ones(100))


def test_unavailable_store_costs_misses(
    opened: Open, folder: dict[str, Any], tmp_path: Path
) -> None:
    dictionary, lookup = opened(KVStoreBuffer, folder), opened(KVLookupBuffer, folder)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    (tmp_path / "store").touch()
    dictionary.put("key", torch.ones(1))
    assert dictionary.get("key") is None
    insert(lookup, TOKENS)
    assert take(lookup, TOKENS) is None
    assert take(lookup, None) is None
    assert (dictionary.counters["not stored"], dictionary.counters["unavailable"]) == (1, 1)
    assert (lookup.counters["not inserted"], lookup.counters["unavailable"]) == (1, 2)


@pytest.mark.parametrize("kind", [KVStoreBuffer, KVLookupBuffer])
def test_wrong_option_and_closed_buffer_raise_clear_errors(
    kind: type[Any], folder: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"options\.urll: unknown option"):
        kind({"urll": "/x"})
    buffer = kind(folder)
    buffer.close()
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        buffer.get("key") if kind is KVStoreBuffer else buffer.drop_select(None, None)


# --- KV caches by their tokens ---


def insert(
    buffer: KVLookupBuffer, tokens: list[int], mark: float = 0.0, roi: list[int] | None = None
) -> None:
    """Insert an entry of these tokens whose tensors contain `mark`."""
    mask = torch.tensor(roi or [1] * len(tokens), dtype=torch.bool)
    cache = torch.full((2, len(tokens), 4), mark)
    buffer.insert(torch.tensor(tokens), mask, cache, cache + 0.5, torch.full((1, 8), mark))


def take(
    buffer: KVLookupBuffer, tokens: list[int] | None, roi: list[int] | None = None
) -> float | None:
    """Take an entry and return its mark; None if none matches."""
    if tokens is None:
        found = buffer.drop_select(None, None)
    else:
        mask = torch.tensor(roi or [1] * len(tokens), dtype=torch.bool)
        found = buffer.drop_select(torch.tensor(tokens), mask)
    entry = [tensor for tensor in found if tensor is not None]
    if not entry:
        return None
    input_tokens, roi_found, key, value, hidden = entry
    mark = float(hidden[0, 0])
    assert key.shape == value.shape == (2, len(input_tokens), 4)
    assert torch.equal(key, torch.full_like(key, mark))
    assert torch.equal(value, torch.full_like(value, mark + 0.5))
    assert roi_found.dtype == torch.bool
    return mark


def test_an_entry_is_taken_once(opened: Open, options: dict[str, Any]) -> None:
    one, two = opened(KVLookupBuffer, options), opened(KVLookupBuffer, options)
    insert(one, TOKENS, 3.0)
    assert take(two, TOKENS) == 3.0
    assert take(one, TOKENS) is None
    assert take(two, None) is None
    assert one.counters == {"inserted": 1, "missing": 1}


def test_two_entries_of_the_same_tokens_are_both_taken(
    opened: Open, options: dict[str, Any]
) -> None:
    buffer = opened(KVLookupBuffer, options)
    insert(buffer, TOKENS, 1.0)
    insert(buffer, TOKENS, 2.0)
    assert {take(buffer, TOKENS), take(buffer, TOKENS), take(buffer, TOKENS)} == {1.0, 2.0, None}


def test_entry_with_the_most_tokens_in_common_is_taken(
    opened: Open, folder: dict[str, Any]
) -> None:
    buffer = opened(KVLookupBuffer, folder)
    stored = {8: 8.0, 20: 20.0, 30: 30.0, 40: 40.0}
    for length, mark in stored.items():
        insert(buffer, TOKENS[:length], mark)
    insert(buffer, [*TOKENS[:20], 7, 7], -1.0)
    insert(buffer, [7, *TOKENS[1:]], -2.0)
    assert take(buffer, TOKENS[:30]) == 30.0, "all tokens, and no further ones"
    assert take(buffer, TOKENS[:30]) == 40.0, "all tokens, and further ones"
    assert take(buffer, TOKENS[:30]) == 20.0, "the longest prefix"
    assert take(buffer, TOKENS[:30]) == 8.0
    assert take(buffer, TOKENS[:30]) is None
    assert take(buffer, [7]) == -2.0
    assert take(buffer, TOKENS[:3]) == -1.0


def test_only_tokens_of_interest_are_compared(opened: Open, folder: dict[str, Any]) -> None:
    buffer = opened(KVLookupBuffer, folder)
    roi = [1] * 20 + [0] * 20
    insert(buffer, TOKENS, 1.0, roi)
    assert take(buffer, TOKENS[20:]) is None
    assert take(buffer, [*TOKENS[:20], 5, 6]) == 1.0
    insert(buffer, TOKENS, 2.0, [0, *[1] * 39])
    assert take(buffer, TOKENS) is None
    assert take(buffer, [9, *TOKENS[1:]], [0, *[1] * 39]) == 2.0


def test_entry_with_a_colliding_name_does_not_match(
    opened: Open, folder: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # No real collision is known.
    monkeypatch.setattr("kvshare.pre_v1.index._digest", lambda _: "0" * 12)
    buffer = opened(KVLookupBuffer, folder)
    insert(buffer, TOKENS)
    assert take(buffer, TOKENS[::-1]) is None
    assert take(buffer, TOKENS) == 0.0


@pytest.mark.parametrize(
    ("tokens", "roi", "words"),
    [
        (torch.ones(3), torch.ones(3), "input_tokens: expected integers"),
        (torch.ones(3, 1, dtype=torch.int64), torch.ones(3, 1), "input_tokens: .* one dimension"),
        (torch.arange(3), torch.ones(2, dtype=torch.bool), "roi: expected a mask of 3 tokens"),
        (torch.arange(3), torch.zeros(3, dtype=torch.bool), "roi: no token is of interest"),
    ],
)
def test_malformed_tokens_and_masks_raise_value_error(
    opened: Open, folder: dict[str, Any], tokens: Tensor, roi: Tensor, words: str
) -> None:
    buffer = opened(KVLookupBuffer, folder)
    with pytest.raises(ValueError, match=words):
        buffer.insert(tokens, roi, tokens, tokens, tokens)
    with pytest.raises(ValueError, match=words):
        buffer.drop_select(tokens, roi)
    with pytest.raises(ValueError, match="give both, or neither"):
        buffer.drop_select(tokens, None)


def test_damaged_entry_stays_and_another_is_taken(
    opened: Open, folder: dict[str, Any], tmp_path: Path
) -> None:
    buffer = opened(KVLookupBuffer, folder)
    insert(buffer, TOKENS, 1.0)
    (path,) = (tmp_path / "store").rglob("kv/2/*/*/*-*")
    body = path.read_bytes()
    path.unlink()
    path.write_bytes(body[:-1])
    insert(buffer, TOKENS[:20], 2.0)
    assert take(buffer, TOKENS) == 2.0
    assert path.exists()
    assert buffer.counters["corrupt"] == 1


@pytest.mark.s3
def test_lookup_buffer_refuses_a_server_that_overwrites() -> None:
    with Rclone(LOGS, "rclone-buffers") as server:
        options = {"url": server.url, "storage_options": server.storage_options}
        with pytest.raises(ConfigError, match=r"options\.url: .*overwrites"):
            KVLookupBuffer(options)
        buffer = KVStoreBuffer(options)
        buffer.put("key", torch.ones(1))
        buffer.put("key", torch.zeros(1))
        found = buffer.get("key")
        buffer.close()
    assert found is not None
    assert torch.equal(found, torch.zeros(1))


def test_lookup_buffer_refuses_a_folder_without_hard_links(
    folder: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ConfigError, match=r"options\.url: .*hard links"):
        KVLookupBuffer(folder)


def entry_reads(store: Watched) -> list[str]:
    """Return a list that collects the keys of entries that are read."""
    read = list[str]()

    def record(key: Key, sink: Sink) -> Sink:
        if store.is_entry(key):
            read.append(key)
        return sink

    store.sinks = record
    return read


def test_longer_entries_that_do_not_match_are_not_taken(
    opened: Open, options: dict[str, Any]
) -> None:
    """Their names do not show whether they match."""
    buffer = opened(KVLookupBuffer, options)
    for number in range(10):
        insert(buffer, [*TOKENS[:20], number, *TOKENS], float(number))
    assert take(buffer, [*TOKENS[:20], 7, *TOKENS[:5]]) == 7.0
    assert take(buffer, [*TOKENS[:20], 7]) is None
    assert take(buffer, TOKENS[1:4]) is None
    assert take(buffer, TOKENS[:4]) is not None


def test_entries_with_other_first_tokens_are_not_read(
    opened: Open, folder: dict[str, Any], tmp_path: Path, watched: list[Watched]
) -> None:
    """The other entry is in the same listing: the first two digits of its name are the same."""
    buffer = opened(KVLookupBuffer, folder)
    insert(buffer, TOKENS)
    (path,) = files(tmp_path)
    beside, namespace = path.parent.name, path.parent.parent.name
    assert take(buffer, TOKENS) == 0.0
    other = next(
        [number, *TOKENS]
        for number in range(10_000)
        if EntryName.new(namespace, [number, *TOKENS]).key.split("/")[-2] == beside
    )
    insert(buffer, other, 1.0)
    read = entry_reads(watched[0])
    assert take(buffer, TOKENS) is None
    assert not read
    assert take(buffer, other) == 1.0
    assert read


def spoil_entry(tmp_path: Path) -> Path:
    """Overwrite the only entry with other bytes; return its path."""
    (path,) = files(tmp_path)
    path.unlink()
    path.write_bytes(b"no entry")
    return path


def test_damaged_longer_entry_stays(opened: Open, folder: dict[str, Any], tmp_path: Path) -> None:
    buffer = opened(KVLookupBuffer, folder)
    insert(buffer, TOKENS)
    path = spoil_entry(tmp_path)
    assert take(buffer, TOKENS[:30]) is None
    assert path.exists()
    assert buffer.counters["corrupt"] == 1


class Damaging:
    """A Sink that passes data to another Sink, with byte 5000 changed."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def begin(self, num_bytes: int) -> None:
        self._sink.begin(num_bytes)

    def write(self, offset: int, piece: Buffer) -> None:
        copy = bytearray(piece)
        if offset <= 5000 < offset + len(copy):
            copy[5000 - offset] ^= 0xFF
        self._sink.write(offset, copy)


def test_entry_damaged_in_transit_to_one_host_stays_for_others(
    opened: Open, folder: dict[str, Any], watched: list[Watched]
) -> None:
    buffer, other = opened(KVLookupBuffer, folder), opened(KVLookupBuffer, folder)
    insert(buffer, TOKENS, 1.0)
    reads = list[Key]()

    def damage(key: Key, sink: Sink) -> Sink:
        if not watched[0].is_entry(key):
            return sink
        reads.append(key)
        return Damaging(sink)

    watched[0].sinks = damage
    assert take(buffer, TOKENS) is None
    assert len(reads) == buffer.counters["corrupt"] == 1
    assert take(other, TOKENS) == 1.0


def test_tensors_of_an_entry_may_share_memory(opened: Open, folder: dict[str, Any]) -> None:
    buffer = opened(KVLookupBuffer, folder)
    cache, tokens = torch.randn(2, 40, 4), torch.tensor(TOKENS)
    roi = torch.ones(40, dtype=torch.bool)
    buffer.insert(tokens, roi, cache, cache, cache[1])
    found = buffer.drop_select(tokens, roi)
    for tensor, expected in zip(found, [tokens, roi, cache, cache, cache[1]], strict=True):
        assert tensor is not None
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("limit_bytes", [1000, 12_200])
def test_tensors_larger_than_an_object_are_not_stored(
    opened: Open,
    folder: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit_bytes: int,
) -> None:
    """Either the tensors alone are too large, or the tensors with the header are."""
    dictionary, lookup = opened(KVStoreBuffer, folder), opened(KVLookupBuffer, folder)
    tensor, tokens = torch.zeros(2048), torch.tensor([1])
    monkeypatch.setattr("kvshare.pre_v1.buffers.MAX_OBJECT_BYTES", limit_bytes)
    dictionary.put("key", tensor)
    lookup.insert(tokens, tokens, tensor, tokens, tokens)
    assert (dictionary.counters, lookup.counters) == ({"not stored": 1}, {"not inserted": 1})
    assert f"it has 12288 bytes, an object at most {limit_bytes}" in caplog.text
    assert take(lookup, None) is None
    monkeypatch.setattr("kvshare.pre_v1.buffers.MAX_OBJECT_BYTES", 20_000)
    dictionary.put("key", tensor)
    lookup.insert(tokens, tokens, tensor, tokens, tokens)
    assert torch.equal(dictionary.get("key"), tensor)
    assert lookup.drop_select(tokens, tokens)[0] is not None


def test_tensors_larger_than_an_object_are_never_copied(
    opened: Open, folder: dict[str, Any]
) -> None:
    dictionary, lookup = opened(KVStoreBuffer, folder), opened(KVLookupBuffer, folder)
    huge, tokens = torch.zeros(1).expand(1 << 50), torch.tensor([1])
    dictionary.put("key", huge)
    lookup.insert(tokens, tokens, huge, huge, huge)
    assert (dictionary.counters, lookup.counters) == ({"not stored": 1}, {"not inserted": 1})


# --- hostile objects ---


def sealed(key: str, facts: TensorSpec, payload: bytes) -> bytes:
    body = bytearray(PROLOGUE_BYTES) + payload
    seal(memoryview(body), facts, key)
    return bytes(body)


@pytest.mark.parametrize(
    ("facts", "payload"),
    [
        (TensorSpec("U16", (1,)), b"ab"),
        (TensorSpec("U64", (0,)), b""),
        (TensorSpec("F32", (1 << 47, 1 << 47, 0)), b""),
    ],
)
def test_tensor_that_torch_cannot_represent_is_missing(
    opened: Open, folder: dict[str, Any], tmp_path: Path, facts: TensorSpec, payload: bytes
) -> None:
    buffer = opened(KVStoreBuffer, folder)
    buffer.put("key", torch.ones(1))
    (path,) = (tmp_path / "store").rglob("kv/2/*/*/*")
    path.unlink()
    path.write_bytes(sealed(str(path.relative_to(tmp_path / "store")), facts, payload))
    assert buffer.get("key") is None
    assert buffer.counters["corrupt"] == 1


def replace_entry(buffer: KVLookupBuffer, tmp_path: Path, spec: TensorSpec, payload: bytes) -> None:
    """Replace an entry of the token 7 by a hostile object."""
    insert(buffer, [7])
    path = spoil_entry(tmp_path)
    path.write_bytes(sealed(str(path.relative_to(tmp_path / "store")), spec, payload))


def file(header: dict[str, Any] | bytes, payload: bytes = b"") -> bytes:
    """Return the bytes of an entry of the token 7 with this safetensors file."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + payload


def tensors_of(dtype: str, num_bytes: int, shape: list[int]) -> dict[str, Any]:
    """Return the header of an entry with consecutive tensors of one dtype and shape."""
    return {
        name: {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [n * num_bytes, (n + 1) * num_bytes],
        }
        for n, name in enumerate(NAMES)
    }


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"abc",
        struct.pack("<Q", 1 << 63),
        file(b"{"),
        file({}),
        file(tensors_of("I64", 0, [1 << 62, 1 << 62, 0])),
        file(tensors_of("I64", 0, [(1 << 64) - 1, 0])),
        file(tensors_of("F4", 1, [2]), b"ababa"),
        file(tensors_of("F8_E8M0", 1, [1]), b"ababa"),
        file(tensors_of("F8_E4M3", 1, [1]), b"ababa"),
        file(tensors_of("U16", 2, [1]), b"ab" * 5),
        file(tensors_of("C64", 8, [1]), b"abcdefgh" * 5),
        file(tensors_of("I64", 8, []), b"abcdefgh" * 5),
    ],
)
@pytest.mark.parametrize("tokens", [[7], [7, 8], None])
def test_malformed_entry_does_not_match(
    opened: Open,
    folder: dict[str, Any],
    tmp_path: Path,
    payload: bytes,
    tokens: list[int] | None,
) -> None:
    buffer = opened(KVLookupBuffer, folder)
    replace_entry(buffer, tmp_path, TensorSpec("U8", (len(payload),)), payload)
    found = None if tokens is None else torch.tensor(tokens)
    roi = None if found is None else torch.ones_like(found)
    assert len(buffer.drop_select(found, roi)) == 5
    insert(buffer, [7], 1.0)
    assert take(buffer, [7]) == 1.0


def test_tokens_that_torch_cannot_index_do_not_match() -> None:
    """Only some releases of safetensors accept this dtype, so the tensor is made directly."""
    tensor = torch.empty(1, dtype=torch.float4_e2m1fn_x2)
    assert not EntryName(Key("key"), 1, "digest").covers([tensor] * 5, None)


@pytest.mark.parametrize("dtype", ["BF16", "F32", "BOOL"])
def test_an_entry_that_is_not_bytes_is_damaged(
    opened: Open, folder: dict[str, Any], tmp_path: Path, dtype: str
) -> None:
    buffer = opened(KVLookupBuffer, folder)
    spec = TensorSpec(dtype, (20,))
    replace_entry(buffer, tmp_path, spec, bytes(spec.num_bytes))
    assert take(buffer, [7]) is None
    assert buffer.counters["corrupt"] == 1


# --- exactly once ---

TAKER = """
import json, sys, torch
from kvshare.pre_v1.buffers import KVLookupBuffer
buffer = KVLookupBuffer(json.loads(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
idle = 0
while idle < 3:
    found = buffer.drop_select(None, None)
    if found[0] is None:
        idle += 1
        continue
    print("taken", int(found[4][0, 0]), flush=True)
buffer.close()
"""


def takers(options: dict[str, Any], count: int) -> list[subprocess.Popen[str]]:
    """Start processes that take all entries, and release them together."""
    command = [sys.executable, "-c", TAKER, json.dumps(options)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(count)]  # type: ignore[call-overload]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    return started


def taken_by(process: subprocess.Popen[str]) -> list[int]:
    out, _ = process.communicate()
    return [int(line.split()[1]) for line in out.splitlines() if line.startswith("taken")]


@pytest.mark.nightly
def test_among_many_takers_each_entry_is_taken_once(opened: Open, options: dict[str, Any]) -> None:
    buffer = opened(KVLookupBuffer, options)
    for number in range(40):
        insert(buffer, [number, *TOKENS], float(number))
    taken = [number for process in takers(options, 4) for number in taken_by(process)]
    assert sorted(taken) == list(range(40))
    assert take(buffer, None) is None


@pytest.mark.nightly
def test_killed_takers_take_nothing_twice_and_at_most_one_each(
    opened: Open, options: dict[str, Any]
) -> None:
    """kill -9 at any moment; an entry that is being taken at that moment may be lost."""
    buffer = opened(KVLookupBuffer, options)
    for number in range(60):
        insert(buffer, [number, *TOKENS], float(number))
    started = takers(options, 4)
    doomed, spared = started[:3], started[3:]
    for turn, process in enumerate(doomed):
        for _ in range(2 + turn):
            os.read(process.stdout.fileno(), 1)  # type: ignore[union-attr]
        process.send_signal(signal.SIGKILL)
    taken = Counter(number for process in spared for number in taken_by(process))
    for process in doomed:
        out, _ = process.communicate()
        # The first bytes were read above; whole lines only.
        taken.update(int(each.split()[-1]) for each in out.splitlines() if " " in each)
    while (mark := take(buffer, None)) is not None:
        taken[int(mark)] += 1
    assert max(taken.values()) == 1, "twice"
    assert len(taken) >= 60 - 2 * len(doomed), "more entries were lost than were being taken"


def test_entry_of_a_killed_taker_is_not_taken(
    opened: Open, folder: dict[str, Any], watched: list[Watched]
) -> None:
    buffer = opened(KVLookupBuffer, folder)
    insert(buffer, TOKENS, 1.0)
    insert(buffer, TOKENS[:20], 2.0)

    def die(keys: Sequence[Key]) -> None:
        if watched[0].is_entry(keys[0]):
            raise RuntimeError("killed")

    watched[0].before["delete"] = die
    with pytest.raises(RuntimeError, match="killed"):
        take(buffer, TOKENS)
    watched[0].before.clear()
    assert take(buffer, TOKENS) == 2.0
    assert take(opened(KVLookupBuffer, folder), None) is None


def files(tmp_path: Path) -> list[Path]:
    """Return the paths of all entries and markers."""
    return [*(tmp_path / "store").rglob("kv/2/*/*/*-*")]


def test_entry_that_reappears_is_not_taken_again(
    opened: Open, folder: dict[str, Any], tmp_path: Path
) -> None:
    """This happens when a client that lost the answer repeats its put, and the repeat is slow."""
    buffer = opened(KVLookupBuffer, folder)
    insert(buffer, TOKENS, 1.0)
    (path,) = (tmp_path / "store").rglob("kv/2/*/*/*-*")
    body = path.read_bytes()
    assert take(buffer, TOKENS) == 1.0
    path.write_bytes(body)
    assert take(buffer, TOKENS) is None
    assert take(opened(KVLookupBuffer, folder), None) is None


@pytest.mark.parametrize("call", ["exists", "delete"])
def test_entry_is_taken_once_though_the_store_fails_meanwhile(
    opened: Open, folder: dict[str, Any], watched: list[Watched], call: str
) -> None:
    """It is taken by the failing call or a later one."""
    buffer = opened(KVLookupBuffer, folder)
    insert(buffer, TOKENS, 1.0)
    calls = list[Sequence[Key]]()

    def fail(keys: Sequence[Key]) -> None:
        if watched[0].is_entry(keys[0]):
            calls.append(keys)
            raise StoreUnavailable("for a moment")

    watched[0].before[call] = fail
    first = take(buffer, TOKENS)
    watched[0].before.clear()
    assert calls
    assert (first, take(buffer, TOKENS)) == ((None, 1.0) if call == "exists" else (1.0, None))
