# SPDX-License-Identifier: Apache-2.0
"""KV that is stored as 8-bit floats: by layout, by the worker half alone, and by whole engines."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec

from ecshare.plugin.ranks import Rank
from ecshare.store.config import parse
from ecshare.store.errors import ConfigError
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal, unseal
from ecshare.store.keys import Kind, object_key
from ecshare.transfer.device.load_streams import LoadStreams
from ecshare.transfer.device.staging import Staging
from kvshare.chunks.prefix import ChunkKey
from kvshare.chunks.shards import Heads, ShardSlice
from kvshare.config import OPTIONS_PATH, KVConfig
from kvshare.connector import KVShareConnector
from kvshare.messages import Piece
from kvshare.worker import float8
from kvshare.worker.blocks import BlockCaches
from kvshare.worker.loads import Finished
from lab.vllm_loop import RunnerName
from tests.kvshare import test_streamed as streams
from tests.kvshare import toy
from tests.kvshare.conftest import StartEngine
from tests.kvshare.gated import GatedFileSystem
from tests.kvshare.test_mixed_sizes import in_two, mark
from tests.kvshare.toy import (
    BLOCK,
    cache_config,
    objects,
    options,
    serve,
    vllm_config,
)
from tests.kvshare.worker import test_blocks as layouts
from tests.kvshare.worker.test_blocks import device
from tests.kvshare.worker.test_worker import (
    BLOCKS,
    CONTENT,
    HEADS,
    LAYERS,
    NAMESPACE,
    TOKENS,
    A,
    B,
    C,
    Host,
    block,
    host,
    name_of,
)

__all__ = ["device", "host"]

FP8 = {"stored_dtype": "fp8"}
PROMPT = list(range(100, 100 + 9 * BLOCK + 3))


def changed(numbers: Tensor) -> Tensor:
    """Encode `numbers` as fp8, decode them, and return the result."""
    packed = torch.empty(*numbers.shape[:-1], numbers.shape[-1] + 1, dtype=torch.uint8)
    float8.encode(numbers.contiguous(), packed)
    back = torch.empty(numbers.shape, dtype=numbers.dtype)
    float8.decode(packed, back)
    return back


# --- by layout ---


def in_8_bits(caches: Sequence[Tensor], heads: int = layouts.HEADS) -> BlockCaches:
    named = layouts.named(list(caches))
    members = layouts.layer_set(named, heads)
    return BlockCaches(named, members, layouts.BLOCKS, layouts.TOKENS, as_float8=True)


def stored(blocks: BlockCaches, piece: Piece) -> tuple[TensorSpec, Tensor]:
    """Return the spec and the payload that are stored for `piece`."""
    staging = Staging(torch.device("cpu"), 1 << 20)
    slab = staging.reserve(blocks.spec(piece))
    assert slab is not None
    with staging.copying([slab]):
        blocks.save([(piece, slab)])
    slab.finish = partial(float8.pack, slab, slab.finish)
    body = slab.arrived()
    assert len(body) == PROLOGUE_BYTES + blocks.num_bytes(piece)
    return slab.spec, slab.payload.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "writer", [layouts.head_major, layouts.token_major, layouts.kernel_blocks, layouts.packed]
)
@pytest.mark.parametrize(
    "reader", [layouts.head_major, layouts.token_major, layouts.kernel_blocks, layouts.axes_moved]
)
@pytest.mark.parametrize("num_buffered", [1, 50])
def test_fp8_blocks_are_read_by_other_layouts_and_head_counts(
    device: str,
    writer: Callable[[], list[Tensor]],
    reader: Callable[[], list[Tensor]],
    dtype: torch.dtype,
    num_buffered: int,
) -> None:
    """Read all heads, and one of them. A GPU decodes `num_buffered` blocks at a time."""
    theirs = [cache.to(dtype) for cache in writer()]
    spec, payload = stored(in_8_bits(theirs), layouts.piece_of([4, 0, 1]))
    for heads in (1, layouts.HEADS):
        ours = [torch.zeros_like(cache.to(dtype)) for cache in reader()]
        if reader is layouts.axes_moved:
            ours = [cache[:heads] for cache in ours]
        else:
            ours = [cache[:, :heads] for cache in ours]
        piece = layouts.piece_of([2, 3], num_blocks=3, first=1)
        first = layouts.HEADS - heads
        shard = ShardSlice(0, layouts.HEADS, Heads(first, heads, first_own=0))
        blocks, piece = in_8_bits(ours, heads), replace(piece, shard=shard)
        assert blocks.can_use(spec, piece)
        assert blocks.is_sound(payload)
        streams = LoadStreams(blocks.device, num_buffered * blocks.block_bytes)
        with streams.after(streams.record()) as stream:
            blocks.write(piece, payload, spec.attributes["order"], stream)
        for layer in range(layouts.LAYERS):
            for before, after in ((0, 2), (1, 3)):
                expected = changed(layouts.page(theirs, layer, before)[first:])
                page = ours[layer][..., after] if reader is layouts.axes_moved else None
                found = layouts.page(ours, layer, after) if page is None else page
                assert torch.equal(found, expected)


def test_fp8_and_plain_chunks_are_not_mixed_up() -> None:
    piece = layouts.piece_of([1])
    caches = layouts.head_major()
    as_it_is, in_8 = layouts.blocks_of(layouts.named(caches)), in_8_bits(caches)
    spec, _ = stored(in_8, piece)
    assert in_8.can_use(spec, piece)
    assert not as_it_is.can_use(spec, piece)
    assert not in_8.can_use(as_it_is.spec(piece), piece)


# --- by the worker half alone ---


def random_cache() -> Tensor:
    sizes = torch.exp(3 * torch.randn(LAYERS, 1, HEADS, TOKENS, 1))
    numbers = torch.randn(LAYERS, BLOCKS, HEADS, TOKENS, CONTENT) * sizes
    return numbers.clamp(-float8.LARGEST, float8.LARGEST)


def in_store(chunk: ChunkKey) -> tuple[str, bytes]:
    """Return the path and the bytes of the object of `chunk`."""
    (path,) = (path for path in GatedFileSystem.store if path.endswith(name_of(chunk)))
    return path, GatedFileSystem.store[path].getvalue()


def put(chunk: ChunkKey, spec: TensorSpec, payload: bytes | bytearray) -> None:
    """Replace an object by another valid one."""
    slab = bytearray(PROLOGUE_BYTES) + payload
    seal(memoryview(slab), spec, object_key(Kind.KV, NAMESPACE, bytes(chunk), "t0of1"))
    path, _ = in_store(chunk)
    GatedFileSystem().pipe_file(path, bytes(slab))


def test_fp8_chunks_take_a_quarter_of_the_bytes(host: Callable[..., Host]) -> None:
    """The KV cache has 32 bits. Host cache and store hold the same bytes."""
    source, target = host(**FP8), host(**FP8)
    source.cache.copy_(random_cache())
    source.save(block(A, TOKENS, 3), block(B, 2, 5))
    assert source.counts() == {"blocks/saved": 2}
    for chunk in (A, B):
        body = in_store(chunk)[1]
        assert len(body) == PROLOGUE_BYTES + LAYERS * HEADS * TOKENS * (CONTENT + 1)
        key = object_key(Kind.KV, NAMESPACE, bytes(chunk), "t0of1")
        spec = unseal(memoryview(body), key).spec
        assert (spec.dtype, spec.attributes["stored_dtype"]) == ("U8", "fp8")
        entry = source.engine.host.open(key)
        assert entry is not None
        assert bytes(entry.body) == body
        entry.close()
    target.load("r", block(A, TOKENS, 1), block(B, 2, 0))
    assert target.settle() == Finished({"r"})
    assert target.counts() == {"blocks/loaded": 2}
    assert torch.equal(target.cache[:, 1], changed(source.cache[:, 3]))
    assert torch.equal(target.cache[:, 0, :, :2], changed(source.cache[:, 5, :, :2]))
    assert target.cache[:, 0, :, 2:].count_nonzero() == 0, (
        "tokens beyond the chunk's end are not written"
    )
    assert target.cache[:, 2:].count_nonzero() == 0


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e9])
def test_values_beyond_fp8_are_not_stored_and_reported_lost(
    host: Callable[..., Host], wrong: float
) -> None:
    """Other engines that wait for the chunk learn that it was given up."""
    source, target = host(**FP8), host(**FP8)
    source.cache.copy_(random_cache())
    source.cache[1, 5, 0, 2, 3] = wrong
    source.save(block(A, TOKENS, 3), block(B, TOKENS, 5), block(C, TOKENS, 6))
    assert source.counts() == {"blocks/saved": 2, "blocks/dropped": 1}
    report = source.worker.report()
    assert report is not None
    assert report.lost == {B}
    target.load("r", block(A, TOKENS, 1), block(B, TOKENS, 2), is_announced=True)
    assert target.settle().invalid_blocks == {2}
    stats = target.worker.take_stats()
    assert stats is not None
    assert stats.data["misses/given_up"] == 1


@pytest.mark.parametrize("exponent", [-128, -16, 8, 127])
def test_exponent_out_of_range_is_a_corrupt_miss(host: Callable[..., Host], exponent: int) -> None:
    """The object is valid otherwise, but its values would not fit float16."""
    source, target = host(**FP8), host(**FP8)
    source.cache.copy_(random_cache())
    source.save(block(A, TOKENS, 3), block(B, TOKENS, 5))
    key = object_key(Kind.KV, NAMESPACE, bytes(B), "t0of1")
    sealed = unseal(memoryview(in_store(B)[1]), key)
    payload = bytearray(sealed.payload)
    payload[-1] = exponent % 256
    put(B, sealed.spec, payload)
    target.load("r", block(A, TOKENS, 1), block(B, TOKENS, 2))
    assert target.settle().invalid_blocks == {2}
    assert target.cache[:, 2].count_nonzero() == 0
    stats = target.worker.take_stats()
    assert stats is not None
    assert stats.data["misses/corrupt"] == 1


@pytest.mark.parametrize(("writes", "reads"), [({}, FP8), (FP8, {})])
def test_object_of_the_other_dtype_under_the_same_key_is_a_miss(
    host: Callable[..., Host], writes: dict[str, str], reads: dict[str, str]
) -> None:
    """Their namespaces differ, so this happens only if an object is copied by hand."""
    source, target = host(**writes), host(**reads)
    source.cache.copy_(random_cache())
    source.save(block(A, TOKENS, 3))
    target.load("r", block(A, TOKENS, 1))
    assert target.settle().invalid_blocks == {1}
    assert target.cache.count_nonzero() == 0


# --- whole engines ---


@pytest.fixture
def kv_of_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the model compute KV that fp8 represents exactly, so that tokens stay the same."""

    def kv_of(tokens: Sequence[int], group: int = 0) -> float:
        digest = hashlib.sha256(repr([*tokens, group]).encode()).digest()
        return float(8 + digest[0] % 8) * 2.0 ** (digest[1] % 9 - 4)

    monkeypatch.setattr(toy, "kv_of", kv_of)


@pytest.mark.usefixtures("kv_of_4_bits")
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("is_async", [False, True])
def test_fp8_engines_share_only_with_each_other(
    start: StartEngine, tmp_path: Path, runner: RunnerName, is_async: bool
) -> None:
    how = {"runner": runner, "is_async": is_async}
    serve(start(store=FP8, **how), PROMPT, max_tokens=1)
    num_stored = len(objects(tmp_path))
    assert serve(start(store=FP8, **how), PROMPT, max_tokens=1).computed_prompt_tokens == 1
    assert serve(start(**how), PROMPT, max_tokens=1).computed_prompt_tokens == len(PROMPT)
    assert len(objects(tmp_path)) == 2 * num_stored
    assert serve(start(**how), PROMPT).computed_prompt_tokens == 1


@pytest.mark.usefixtures("kv_of_4_bits")
def test_fp8_works_with_an_integrity_key(start: StartEngine, tmp_path: Path) -> None:
    secret = "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2"
    how = {**FP8, "integrity_key": secret}
    serve(start(store=how), PROMPT, max_tokens=1)
    elsewhere = start(store={**how, "host_cache_dir": f"{tmp_path}/other-host"})
    assert serve(elsewhere, PROMPT, max_tokens=1).computed_prompt_tokens == 1


@pytest.mark.usefixtures("kv_of_4_bits")
def test_fp8_shards_of_another_tp_size_are_loaded(start: StartEngine, tmp_path: Path) -> None:
    serve(start(store=FP8), PROMPT, max_tokens=1)
    for path in objects(tmp_path):
        in_two(path, tmp_path)
    mark(tmp_path, 2)
    reader = start(store={**FP8, "host_cache_dir": f"{tmp_path}/other-host"})
    assert serve(reader, PROMPT).computed_prompt_tokens == 1


@pytest.mark.usefixtures("kv_of_4_bits")
@pytest.mark.parametrize("is_async", [False, True])
def test_fp8_chunks_are_streamed_during_prefill(gated: StartEngine, is_async: bool) -> None:
    p, d = streams.start_p(gated, **FP8), streams.start_d(gated, is_async=is_async, **FP8)
    streams.hand_over(p, d)


@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_fp8_option_is_refused_for_an_8_bit_cache(
    text_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    role: KVConnectorRole,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr("ecshare.plugin.ranks.worker_rank", lambda _: Rank(0, 1))
    config = vllm_config(text_model, options(tmp_path, **FP8))
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=dtype)
    with pytest.raises(ConfigError, match=rf"{OPTIONS_PATH}\.stored_dtype: .* has 8 or fewer"):
        KVShareConnector(config, role, cache_config(8, [spec]))


def test_unknown_stored_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"options\.stored_dtype"):
        parse(KVConfig, {"url": "/x", "stored_dtype": "int4"}, "options")
