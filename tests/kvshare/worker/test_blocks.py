# SPDX-License-Identifier: Apache-2.0
"""Cache tensors of several layouts -> stored blocks -> cache tensors, byte for byte."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor
from vllm import _custom_ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from ecshare.store.format import TensorSpec
from ecshare.store.keys import JSON
from ecshare.transfer.device.load_streams import LoadStreams
from ecshare.transfer.device.staging import Staging
from kvshare.chunks.layers import AttentionWindow, LayerSet
from kvshare.chunks.prefix import ChunkKey
from kvshare.chunks.shards import Heads, ShardSlice
from kvshare.compat import erase_slots
from kvshare.messages import Piece
from kvshare.worker.blocks import BlockCaches, Read
from lab.gpu_stand_in import stand_in

BLOCKS, HEADS, TOKENS, CONTENT, LAYERS = 5, 2, 8, 6, 12
SHAPE = (LAYERS, 1, HEADS, TOKENS, CONTENT)
NAME = ChunkKey(b"name")


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def head_major() -> list[Tensor]:
    return [numbered(BLOCKS, HEADS, TOKENS, CONTENT) + 1000 * layer for layer in range(LAYERS)]


def token_major() -> list[Tensor]:
    """Make caches with the same axes but other strides: tokens outside heads in memory."""
    caches = [numbered(BLOCKS, TOKENS, HEADS, CONTENT) + 1000 * layer for layer in range(LAYERS)]
    return [cache.transpose(1, 2) for cache in caches]


def packed() -> list[Tensor]:
    """Make caches in one allocation with all layers of a block side by side."""
    return list(numbered(BLOCKS, LAYERS, HEADS, TOKENS, CONTENT).unbind(1))


def axes_moved() -> list[Tensor]:
    """Make caches with the block axis last."""
    return [cache.permute(1, 2, 3, 0) for cache in head_major()]


def kernel_blocks() -> list[Tensor]:
    """Make caches whose kernel blocks are half as long as the cache's blocks."""
    return [numbered(BLOCKS * 2, HEADS, TOKENS // 2, CONTENT) + layer for layer in range(LAYERS)]


def named(caches: list[Tensor]) -> dict[str, Tensor]:
    """Name the caches, in an order other than that of the layers."""
    names = [f"model.layers.{number}.attn" for number in range(len(caches))]
    return dict(sorted(zip(names, caches, strict=True), reverse=True))


def layer_set(names: Iterable[str], heads: int = HEADS) -> LayerSet:
    """Make a set of all layers in one cache group, in the order of their numbers."""
    ordered = sorted(names, key=lambda name: int(name.split(".")[-2 if "attn" in name else -1]))
    return LayerSet(0, (0,), tuple((name, 0) for name in ordered), AttentionWindow(), heads, heads)


def blocks_of(caches: dict[str, Tensor], heads: int = HEADS) -> BlockCaches:
    return BlockCaches(caches, layer_set(caches, heads), BLOCKS, TOKENS)


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use the CPU as itself, or as a stand-in for a GPU."""
    if request.param == "gpu":
        stand_in(monkeypatch)
    return str(request.param)


def piece_of(
    *groups: Sequence[int], num_blocks: int = 0, num_tokens: int = 0, first: int = 0
) -> Piece:
    """Make a piece of each group's blocks; by default a whole chunk with all its tokens."""
    count = num_blocks or len(groups[0])
    ids = tuple(tuple(each) for each in groups)
    return Piece(NAME, count, num_tokens or count * TOKENS, ids, first)


def saved(blocks: BlockCaches, piece: Piece) -> Tensor:
    """Return the payload that is stored for `piece`."""
    staging = Staging(torch.device("cpu"), 1 << 20)
    slab = staging.reserve(blocks.spec(piece))
    assert slab is not None
    slab.payload.fill_(1)  # garbage, as in a reused slab
    with staging.copying([slab]):
        blocks.save([(piece, slab)])
    slab.arrived()
    return slab.payload.clone()


def by_token(blocks: BlockCaches, piece: Piece) -> Tensor:
    """Return the stored payload as [head, layer, token, content], by its attributes alone."""
    payload, order = saved(blocks, piece), blocks.spec(piece).attributes["order"]
    pages = payload if order == "head token" else payload.transpose(2, 3)
    heads, layers = pages.shape[2], pages.shape[0]
    return pages.permute(2, 0, 1, 3, 4).reshape(heads, layers, -1, CONTENT)


def write(
    blocks: BlockCaches,
    piece: Piece,
    payload: Tensor,
    order: JSON = "head token",
    num_buffered: int = 1,
    read: Read | None = None,
) -> None:
    """Load a payload that an engine stored with axes in `order`.

    `num_buffered`: how many blocks of a layer go to a GPU at a time. `read`: see `BlockCaches`.
    """
    like = blocks.spec(piece)
    spec = TensorSpec(like.dtype, tuple(payload.shape), {**like.attributes, "order": order})
    assert blocks.can_use(spec, piece)
    streams = LoadStreams(blocks.device, num_buffered * blocks.block_bytes)
    with streams.after(streams.record()) as stream:
        blocks.write(piece, payload, order, stream, read)


def page(caches: list[Tensor], layer: int, block_id: int) -> Tensor:
    """Return one block of one layer as [head, token, content], read by its axes alone."""
    cache = caches[layer]
    if cache.shape[0] == 2 * BLOCKS:  # kernel blocks
        return torch.cat([cache[2 * block_id], cache[2 * block_id + 1]], dim=1)
    return cache[..., block_id] if cache.shape[0] == HEADS else cache[block_id]


LAYOUTS = [head_major, token_major, packed, axes_moved, kernel_blocks]


@pytest.mark.parametrize("make", LAYOUTS)
def test_payload_holds_blocks_in_the_order_of_the_piece(
    device: str, make: Callable[[], list[Tensor]]
) -> None:
    caches = make()
    payload = by_token(blocks_of(named(caches)), piece_of([4, 0, 1]))
    for layer in range(LAYERS):
        expected = torch.cat([page(caches, layer, block_id) for block_id in (4, 0, 1)], dim=1)
        assert torch.equal(payload[:, layer], expected)


@given(
    st.sampled_from(LAYOUTS),
    st.permutations(range(BLOCKS)),
    st.permutations(range(BLOCKS)),
    st.integers(0, BLOCKS - 1),
    st.integers(0, 2 * BLOCKS),
    st.data(),
)
def test_blocks_survive_a_round_trip(
    make: Callable[[], list[Tensor]],
    sources: list[int],
    targets: list[int],
    first: int,
    num_buffered: int,
    data: st.DataObject,
) -> None:
    """Move any blocks to any blocks: a whole chunk, or some of its blocks.

    `num_buffered`: 0 on a CPU, else the number of blocks that a GPU buffers.
    """
    with pytest.MonkeyPatch.context() as patch:
        if num_buffered:
            stand_in(patch)
        end = data.draw(st.integers(first + 1, BLOCKS))
        _round_trip(make, sources, targets, first, end, num_buffered)


def _round_trip(
    make: Callable[[], list[Tensor]],
    sources: list[int],
    targets: list[int],
    first: int,
    end: int,
    num_buffered: int,
) -> None:
    source, target = make(), [torch.zeros_like(cache) for cache in make()]
    writer = blocks_of(named(source))
    whole = piece_of(sources)
    some = piece_of(targets[first:end], num_blocks=BLOCKS, first=first)
    order = writer.spec(whole).attributes["order"]
    write(blocks_of(named(target)), some, saved(writer, whole), order, num_buffered)
    for layer in range(LAYERS):
        for number, (before, after) in enumerate(zip(sources, targets, strict=True)):
            written = page(target, layer, after)
            if first <= number < end:
                assert torch.equal(written, page(source, layer, before))
            else:
                assert written.count_nonzero() == 0, "other blocks were touched"


@pytest.mark.parametrize("num_buffered", [1, 3, 2 * BLOCKS])
@pytest.mark.parametrize(("first", "end"), [(0, BLOCKS), (1, 4)])
@pytest.mark.parametrize("make", [head_major, token_major, kernel_blocks])
def test_gpu_gets_blocks_from_the_file_instead_of_its_mapping(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], list[Tensor]],
    first: int,
    end: int,
    num_buffered: int,
) -> None:
    stand_in(monkeypatch)
    source, target = make(), [torch.zeros_like(cache) for cache in make()]
    writer, ids = blocks_of(named(source)), list(range(BLOCKS))
    payload = saved(writer, piece_of(ids))
    octets = payload.view(-1).view(torch.uint8).numpy().data

    def read(offset: int, out: memoryview) -> None:
        out[:] = octets[offset : offset + len(out)]

    mapped = torch.full_like(payload, -1.0)
    order = writer.spec(piece_of(ids)).attributes["order"]
    some = piece_of(ids[first:end], num_blocks=BLOCKS, first=first)
    write(blocks_of(named(target)), some, mapped, order, num_buffered, read)
    for layer in range(LAYERS):
        for block in range(BLOCKS):
            expected = page(source, layer, block)
            if not first <= block < end:
                expected = torch.zeros_like(expected)
            assert torch.equal(page(target, layer, block), expected)


@pytest.mark.parametrize("make", [head_major, token_major, kernel_blocks])
def test_payload_keeps_the_memory_layout_of_blocks(
    device: str, make: Callable[[], list[Tensor]]
) -> None:
    """So saving adjacent blocks takes one copy a layer."""
    caches = make()
    payload = saved(blocks_of(named(caches)), piece_of([2, 3])).flatten()
    layers = [
        cache.view(BLOCKS, -1) if cache.is_contiguous() else cache.transpose(1, 2).view(BLOCKS, -1)
        for cache in caches
    ]
    assert torch.equal(payload, torch.stack([each[2:4] for each in layers]).flatten())


@pytest.mark.parametrize("writer", [head_major, token_major, kernel_blocks])
@pytest.mark.parametrize("reader", [head_major, token_major, kernel_blocks])
def test_one_head_is_read_from_chunks_of_other_layouts(
    device: str, writer: Callable[[], list[Tensor]], reader: Callable[[], list[Tensor]]
) -> None:
    """The chunk was stored by an engine of a smaller tensor-parallel size."""
    theirs = writer()
    whole = piece_of([4, 0, 1])
    blocks = blocks_of(named(theirs))
    ours = [torch.zeros_like(cache)[:, :1] for cache in reader()]
    one_head = replace(
        piece_of([2, 3], num_blocks=3, first=1),
        shard=ShardSlice(0, HEADS, Heads(1, 1, first_own=0)),
    )
    order = blocks.spec(whole).attributes["order"]
    write(blocks_of(named(ours), heads=1), one_head, saved(blocks, whole), order)
    for layer in range(LAYERS):
        for before, after in ((0, 2), (1, 3)):
            assert torch.equal(page(ours, layer, after), page(theirs, layer, before)[1:])


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "I32"},
        {"shape": SHAPE[:-1]},
        {"shape": (LAYERS - 1, *SHAPE[1:])},
        {"shape": (LAYERS, 2, *SHAPE[2:])},
        {"shape": (LAYERS, 1, HEADS + 1, TOKENS, CONTENT)},
        {"shape": (LAYERS, 1, TOKENS, HEADS, CONTENT)},
        {"shape": (LAYERS, TOKENS * 2, HEADS, 0, CONTENT)},
        {"shape": (*SHAPE[:-1], CONTENT + 2)},
        {"attributes": {}},
        {"attributes": {"order": "token head"}},
        {"attributes": {"order": "sideways"}},
        {"attributes": {"order": ["head token"]}},
        {"attributes": {"chunk": "00"}},
        {"attributes": {"num_tokens": 1}},
        {"attributes": {"block_tokens": 1}},
        {"attributes": {"more": 1}},
    ],
)
def test_chunk_with_a_wrong_spec_is_not_used(change: dict[str, Any]) -> None:
    blocks, piece = blocks_of(named(head_major())), piece_of([1])
    spec = blocks.spec(piece)
    assert blocks.can_use(spec, piece)
    if change.get("attributes"):
        change = {"attributes": {**spec.attributes, **change["attributes"]}}
    assert not blocks.can_use(structs.replace(spec, **change), piece)


@pytest.mark.parametrize(("num_blocks", "num_tokens"), [(1, 3 * TOKENS), (TOKENS, 3)])
def test_chunk_with_another_block_size_is_not_used(num_blocks: int, num_tokens: int) -> None:
    """The total number of tokens is the same."""
    blocks, piece = blocks_of(named(head_major())), piece_of([1, 2, 3])
    shape = (LAYERS, num_blocks, HEADS, num_tokens, CONTENT)
    spec = blocks.spec(piece)
    assert structs.replace(spec, shape=shape).num_bytes == spec.num_bytes
    assert not blocks.can_use(structs.replace(spec, shape=shape), piece)


def test_interleaved_cpu_blocks_are_read_only_at_their_own_size() -> None:
    piece = piece_of([1])
    of_halves = blocks_of(named(kernel_blocks())).spec(piece)
    caches = named(head_major())
    assert blocks_of(caches).can_use(of_halves, piece)
    mixed = BlockCaches(caches, layer_set(caches), BLOCKS, TOKENS, erase=backwards)
    assert not mixed.can_use(of_halves, piece)
    assert mixed.has_another_layout(of_halves, piece)


def test_opaque_blocks_are_read_only_in_their_own_order_and_size() -> None:
    piece, caches = piece_of([1]), named(head_major())
    opaque = BlockCaches(caches, layer_set(caches), BLOCKS, TOKENS, erase=fails)
    assert opaque.can_use(blocks_of(caches).spec(piece), piece)
    for make in (token_major, kernel_blocks):
        other = blocks_of(named(make())).spec(piece)
        assert not opaque.can_use(other, piece)
        assert opaque.has_another_layout(other, piece)
    for field in ("block_tokens", "num_tokens", "chunk"):
        spec = opaque.spec(piece)
        wrong = structs.replace(spec, attributes={**spec.attributes, field: 2 * TOKENS})
        assert not opaque.can_use(wrong, piece)
        assert not opaque.has_another_layout(wrong, piece)


@pytest.mark.parametrize("make", LAYOUTS)
def test_tokens_beyond_num_tokens_are_stored_as_zero(
    device: str, make: Callable[[], list[Tensor]]
) -> None:
    """They may hold KV of an earlier request."""
    caches = [cache + 1 for cache in make()]
    payload = by_token(blocks_of(named(caches)), piece_of([1, 2], num_tokens=TOKENS + 3))
    assert payload[:, :, : TOKENS + 3].count_nonzero() == HEADS * LAYERS * (TOKENS + 3) * CONTENT
    assert payload[:, :, TOKENS + 3 :].count_nonzero() == 0


def backwards(blocks: Tensor, first_token: int) -> None:
    """Erase as a kernel that lays out the tokens of a block from its end."""
    blocks[:, :, : TOKENS - first_token] = 0


def test_interleaved_tokens_are_zeroed_by_the_kernel() -> None:
    caches = named([cache + 1 for cache in head_major()])
    mixed = BlockCaches(caches, layer_set(caches), BLOCKS, TOKENS, erase=backwards)
    assert mixed.erases
    whole = by_token(mixed, piece_of([1, 2]))
    part = by_token(mixed, piece_of([1, 2], num_tokens=TOKENS + 3))
    rest = TOKENS - 3
    assert torch.equal(part[:, :, :TOKENS], whole[:, :, :TOKENS])
    assert part[:, :, TOKENS : TOKENS + rest].count_nonzero() == 0
    assert torch.equal(part[:, :, TOKENS + rest :], whole[:, :, TOKENS + rest :])


def fails(blocks: Tensor, first_token: int) -> None:
    raise RuntimeError("no such kernel")


def does_nothing(blocks: Tensor, first_token: int) -> None:
    pass


@pytest.mark.parametrize("erase", [fails, does_nothing])
def test_kernel_that_fails_to_zero_is_detected(erase: Any) -> None:
    caches = named([cache + 1 for cache in head_major()])
    mixed = BlockCaches(caches, layer_set(caches), BLOCKS, TOKENS, erase=erase)
    assert not mixed.erases
    assert blocks_of(caches).erases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_vllms_cpu_kernel_zeroes_the_tokens_after_the_last(
    dtype: torch.dtype, kernel_blocks: int
) -> None:
    """Compare a block that was filled twice, the second time in part, with a new one."""
    if not current_platform.is_cpu():
        pytest.skip("the kernels of CPUs alone mix tokens")
    current_platform.import_kernels()
    size, num_tokens, content = 64, 17, 64
    cache = torch.zeros(2 * kernel_blocks, HEADS, size // kernel_blocks, content, dtype=dtype)
    fresh = cache.clone()
    erase = partial(erase_slots, dtype=dtype, cache_dtype="auto")
    fill(cache, size, content)
    fill(cache, num_tokens, content)
    fill(fresh, num_tokens, content)
    read = []
    for tensor in (cache, fresh):
        caches = {"layers.0.attn": tensor}
        blocks = BlockCaches(caches, layer_set(caches), 2, size, erase=erase)
        assert blocks.erases
        piece = piece_of([0], num_tokens=num_tokens)
        read.append(saved(blocks, piece))
    assert torch.equal(*read)
    assert read[0].count_nonzero() == HEADS * num_tokens * content


def fill(cache: Tensor, num_tokens: int, content: int) -> None:
    """Write the first `num_tokens` tokens of `cache` with vLLM's kernel."""
    num_blocks, _, size, _ = cache.shape
    keys, values = cache.view(num_blocks, HEADS, 2 * size, content // 2).chunk(2, 2)
    kv = torch.arange(1, num_tokens * HEADS * content // 2 + 1, dtype=torch.float32)
    kv = (kv % 7 + num_tokens).view(num_tokens, HEADS, content // 2).to(cache.dtype)
    kernel = _get_attn_isa(cache.dtype, size, content // 2)
    slots = torch.arange(num_tokens)
    _custom_ops.cpu_attn_reshape_and_cache(kv, kv, keys, values, slots, kernel)


def test_write_to_host_memory_starts_no_threads() -> None:
    if torch.get_num_threads() < 2:
        pytest.skip("one core")
    caches = named([torch.zeros(BLOCKS, HEADS, TOKENS, 4096) for _ in range(2)])
    blocks = blocks_of(caches)
    piece = piece_of(range(4))
    payload = torch.ones(blocks.spec(piece).shape)

    def num_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    with ThreadPoolExecutor(1) as other:
        before = other.submit(num_threads).result()
        other.submit(blocks.write, piece, payload, "head token").result()
        assert other.submit(num_threads).result() <= before
    assert all(cache[:4].min() == 1 for cache in caches.values())


def test_layers_that_share_a_cache_are_stored_once() -> None:
    caches = named(head_major())
    caches["model.layers.99.attn"] = caches["model.layers.3.attn"]
    assert blocks_of(caches).spec(piece_of([0])).shape == SHAPE


def test_spec_holds_chunk_key_tokens_order_and_page() -> None:
    piece = piece_of([0, 1], num_tokens=TOKENS + 5)
    blocks = blocks_of(named(token_major()))
    blocks.layout = "0123456789abcdef"
    spec = blocks.spec(piece)
    assert spec == TensorSpec(
        dtype="F32",
        shape=(LAYERS, 2, TOKENS, HEADS, CONTENT),
        attributes={
            "chunk": NAME.hex(),
            "num_tokens": TOKENS + 5,
            "block_tokens": TOKENS,
            "order": "token head",
            "page": "0123456789abcdef",
        },
    )


@pytest.mark.parametrize(
    ("caches", "says"),
    [
        ({"l.0": numbered(2, BLOCKS, HEADS, TOKENS, CONTENT)}, "cannot be read"),
        ({"l.0": numbered(BLOCKS, TOKENS, CONTENT)}, "cannot be read"),
        ({"l.0": numbered(BLOCKS, HEADS + 1, TOKENS, CONTENT)}, "cannot be read"),
        ({"l.0": numbered(BLOCKS + 1, HEADS, TOKENS, CONTENT)}, "cannot be read"),
        # Two axes could be the tokens', and vLLM's own order is none of the readings.
        ({"l.0": numbered(TOKENS, HEADS, TOKENS, BLOCKS)}, "cannot be read"),
        (
            {
                "l.0": numbered(BLOCKS, HEADS, TOKENS, CONTENT),
                "l.1": numbered(BLOCKS, HEADS, TOKENS, CONTENT + 2),
            },
            "differ",
        ),
        ({"l.0": [numbered(BLOCKS, HEADS, TOKENS, CONTENT)]}, "not a tensor"),
    ],
)
def test_unknown_layouts_are_refused(caches: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        blocks_of(caches)


def test_gpu_layout_without_contiguous_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two values of a block are adjacent."""
    stand_in(monkeypatch)
    with pytest.raises(ValueError, match="no two values side by side"):
        blocks_of({"l.0": numbered(HEADS, TOKENS, CONTENT, BLOCKS).permute(3, 0, 1, 2)})


def test_all_chunks_of_a_step_are_copied_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adjacent blocks are one copy a layer."""
    gpu = stand_in(monkeypatch)
    caches = head_major()
    blocks, staging = blocks_of(named(caches)), Staging(torch.device("cpu"), 1 << 20)
    saves = []
    for piece in (piece_of([1, 2, 3]), piece_of([0, 4])):
        slab = staging.reserve(blocks.spec(piece))
        assert slab is not None
        saves.append((piece, slab))
    with staging.copying([slab for _, slab in saves]):
        blocks.save(saves)
    assert gpu.batches == [LAYERS + 2 * LAYERS]


def test_cache_with_as_many_heads_as_tokens_is_read_in_vllms_order() -> None:
    cache = numbered(BLOCKS, TOKENS, TOKENS, CONTENT)
    payload = by_token(blocks_of({"l.0": cache}, heads=TOKENS), piece_of([2]))
    assert torch.equal(payload[:, 0], cache[2])


def test_cache_groups_use_their_own_block_ids(device: str) -> None:
    """The layers of two groups alternate in the model and share memory."""
    memory = head_major()[:2]
    names = [f"model.layers.{number}.attn" for number in range(4)]
    both = LayerSet(
        0,
        (0, 1),
        tuple((name, number % 2) for number, name in enumerate(names)),
        AttentionWindow(),
        2,
        2,
    )
    caches = dict(zip(names, (memory[0], memory[0], memory[1], memory[1]), strict=True))
    blocks = BlockCaches(caches, both, BLOCKS, TOKENS)
    out = saved(blocks, piece_of([1, 3], [4, 0]))
    assert torch.equal(out[0], memory[0][[1, 3]])
    assert torch.equal(out[1], memory[0][[4, 0]])
    assert torch.equal(out[3], memory[1][[4, 0]])
    for layer in memory:
        layer.zero_()
    write(blocks, piece_of([2], [4], num_blocks=2, first=1), out)
    assert torch.equal(memory[1][2], out[2, 1])
    assert torch.equal(memory[1][4], out[3, 1])
    assert memory[1][[0, 1, 3]].count_nonzero() == 0


def test_cache_without_a_head_axis_counts_as_one_head() -> None:
    cache = numbered(BLOCKS, TOKENS, CONTENT)
    payload = by_token(blocks_of({"l.0": cache}, heads=1), piece_of([2, 4]))
    assert torch.equal(payload[0, 0], torch.cat([cache[2], cache[4]]))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_8_bit_caches_are_stored_as_bytes(device: str, dtype: torch.dtype) -> None:
    source = [(cache % 200).to(torch.uint8).view(dtype) for cache in head_major()]
    target = [torch.zeros_like(cache.view(torch.uint8)).view(dtype) for cache in source]
    blocks = blocks_of(named(source))
    piece = piece_of([3], num_tokens=TOKENS - 1)
    assert blocks.spec(piece).dtype == "U8"
    out = saved(blocks, piece)
    write(blocks_of(named(target)), piece_of([1], num_tokens=TOKENS - 1), out)
    expected = source[5].view(torch.uint8)[3].clone()
    expected[:, -1] = 0
    assert torch.equal(target[5].view(torch.uint8)[1], expected)


# --- states of recurrent layers ---

STATE_BYTES, PAGE_BYTES = 48, 64
NUM_STATES = 3


def states() -> tuple[dict[str, Tensor], Tensor]:
    """Return caches of recurrent layers as vLLM gives them, and the memory that they lie in.

    Each is the first bytes of the pages of its layer; the rest of a page is padding.
    """
    pages = torch.arange(NUM_STATES * BLOCKS * PAGE_BYTES).to(torch.int8)
    memory = pages.view(NUM_STATES, BLOCKS, PAGE_BYTES)
    caches = {
        f"model.layers.{number}.mixer": memory[number, :, :STATE_BYTES].view(BLOCKS, 1, 1, -1)
        for number in range(NUM_STATES)
    }
    return caches, memory


def state_blocks(caches: dict[str, Tensor]) -> BlockCaches:
    layers = tuple((name, number % 2) for number, name in enumerate(sorted(caches)))
    layer_set = LayerSet(1, (1, 2), layers, AttentionWindow(), 1, 1, "state")
    return BlockCaches(caches, layer_set, BLOCKS, 1)


def state_piece(*block_ids: int) -> Piece:
    return Piece(NAME, 1, TOKENS, tuple((each,) for each in block_ids), 0, 1)


@pytest.mark.usefixtures("device")
def test_state_is_copied_between_blocks_without_its_padding() -> None:
    source, _ = states()
    blocks = state_blocks(source)
    payload = saved(blocks, state_piece(1, 4))
    assert payload.numel() == NUM_STATES * STATE_BYTES == blocks.num_bytes(state_piece(1, 4))
    for number, block in enumerate((1, 4, 1)):
        expected = source[f"model.layers.{number}.mixer"][block].view(torch.uint8).flatten()
        assert torch.equal(payload[number].flatten(), expected)
    target, memory = states()
    memory.zero_()
    write(
        state_blocks(target),
        state_piece(2, 3),
        payload,
        blocks.spec(state_piece(1, 4)).attributes["order"],
    )
    for number, block in enumerate((2, 3, 2)):
        assert torch.equal(
            memory[number, block, :STATE_BYTES].view(torch.uint8), payload[number].flatten()
        )
        memory[number, block, :STATE_BYTES] = 0
    assert not memory.any(), "nothing else was written"


@pytest.mark.parametrize(
    "damage",
    [
        {"shape": (NUM_STATES, 1, 1, 1, STATE_BYTES + 1)},
        {"shape": (NUM_STATES + 1, 1, 1, 1, STATE_BYTES)},
        {"shape": (NUM_STATES, 2, 1, 1, STATE_BYTES)},
        {"shape": (NUM_STATES, STATE_BYTES)},
        {"dtype": "F32"},
    ],
)
def test_object_that_is_no_such_state_is_not_used(damage: dict[str, Any]) -> None:
    blocks = state_blocks(states()[0])
    spec = blocks.spec(state_piece(1, 2))
    assert blocks.can_use(spec, state_piece(3, 4))
    assert not blocks.can_use(structs.replace(spec, **damage), state_piece(3, 4))
    other = structs.replace(spec, attributes={**spec.attributes, "chunk": "00"})
    assert not blocks.can_use(other, state_piece(3, 4))
    kernel = structs.replace(spec, attributes={**spec.attributes, "page": "other"})
    assert not blocks.can_use(kernel, state_piece(3, 4))
    assert blocks.has_another_layout(kernel, state_piece(3, 4))
