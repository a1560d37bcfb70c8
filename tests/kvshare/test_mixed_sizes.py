# SPDX-License-Identifier: Apache-2.0
"""A prompt whose chunks were stored by engines of different tensor-parallel sizes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import Request

from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal, unseal
from ecshare.store.keys import FORMAT_VERSION, Kind, object_key
from ecshare.transfer.device.staging import as_tensor
from kvshare.chunks.prefix import Chunk
from tests.kvshare.conftest import StartEngine
from tests.kvshare.toy import (
    BLOCK,
    HEADS,
    ToyEngine,
    chunks_for,
    expected_answer,
    make_request,
    objects,
    serve,
)

LONG = [number * 7 % 900 for number in range(80 * BLOCK + 3)]
NUM_BLOCKS = 200
Pick = Callable[[int], bool]


def in_two(path: Path, root: Path) -> None:
    """Replace an object by the two shards that two ranks would have stored."""
    key = str(path.relative_to(root / "store"))
    whole = unseal(memoryview(path.read_bytes()), key)
    spec = whole.spec
    assert spec.attributes["order"] == "head token"
    heads = as_tensor(whole.payload, spec).chunk(HEADS, 2)
    for rank, head in enumerate(heads):
        name = key.replace(".t0of1", f".t{rank}of2")
        slab = bytearray(PROLOGUE_BYTES) + head.contiguous().numpy().tobytes()
        seal(memoryview(slab), TensorSpec(spec.dtype, tuple(head.shape), spec.attributes), name)
        (root / "store" / name).write_bytes(slab)
    path.unlink()


def mark(root: Path, size: int) -> None:
    """Write the mark that engines of tensor-parallel size `size` store here."""
    (own,) = (root / "store" / "kv" / str(FORMAT_VERSION) / "sizes").glob("*/1")
    own.with_name(str(size)).write_bytes(b"ecshare")


def write(start: StartEngine, root: Path, prompt: list[int], is_split: Pick) -> None:
    """Store `prompt`, and its n-th chunk as two shards if `is_split(n)`."""
    serve(start(num_blocks=NUM_BLOCKS), prompt, max_tokens=1)
    for number, chunk in enumerate(chunks_for(make_request("w", prompt))):
        if is_split(number):
            in_two(stored(root, chunk), root)


def stored(root: Path, chunk: Chunk, part: str = "t0of1") -> Path:
    """Return the file of a chunk."""
    name = object_key(Kind.KV, "0" * 32, bytes(chunk.key), part).rpartition("/")[2]
    (path,) = (root / "store").rglob(name)
    return path


def reader(start: StartEngine, root: Path, **more: Any) -> ToyEngine:
    """Start an engine on another host."""
    return start(num_blocks=NUM_BLOCKS, store={"host_cache_dir": f"{root}/reader"}, **more)


@pytest.mark.parametrize(
    "is_split",
    [
        lambda _: True,
        lambda number: number >= 37,
        lambda number: number < 37,
        lambda number: 30 <= number < 50,
        lambda number: number % 3 == 0,
    ],
)
def test_chunks_stored_by_different_tp_sizes_are_all_loaded(
    start: StartEngine, tmp_path: Path, is_split: Pick
) -> None:
    write(start, tmp_path, LONG, is_split)
    mark(tmp_path, 2)
    assert serve(reader(start, tmp_path), LONG).computed_prompt_tokens == 1


def test_chunk_with_a_missing_shard_is_a_miss_and_saved_again(
    start: StartEngine, tmp_path: Path
) -> None:
    prompt = LONG[: 5 * BLOCK]
    write(start, tmp_path, prompt, lambda _: True)
    mark(tmp_path, 2)
    chunks = chunks_for(make_request("w", prompt))
    stored(tmp_path, chunks[2], "t1of2").unlink()
    assert serve(reader(start, tmp_path), prompt).computed_prompt_tokens == 3 * BLOCK
    assert stored(tmp_path, chunks[2]), "the reader computes and saves it"


@pytest.mark.parametrize("share", ["t0of2", "t1of2"])
def test_damaged_shard_costs_its_chunk_and_later_ones(
    start: StartEngine, tmp_path: Path, share: str
) -> None:
    prompt = LONG[: 5 * BLOCK]
    write(start, tmp_path, prompt, lambda _: True)
    mark(tmp_path, 2)
    chunks = chunks_for(make_request("w", prompt))
    path = stored(tmp_path, chunks[2], share)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert serve(reader(start, tmp_path), prompt).computed_prompt_tokens == 3 * BLOCK
    assert not path.exists()


def test_only_marked_or_announced_tp_sizes_are_looked_up(
    start: StartEngine, tmp_path: Path
) -> None:
    """The size is not marked in the store: only an announcement makes the engine look for it."""
    prompt = LONG[: 5 * BLOCK + 2]
    write(start, tmp_path, prompt, lambda _: True)
    engine = reader(start, tmp_path, kv_role="kv_consumer")
    assert serve(engine, prompt, name="a").computed_prompt_tokens == len(prompt)
    reset(engine)
    (answer,) = engine.run(announced("b", prompt, size=4))
    assert answer.computed_prompt_tokens == len(prompt)
    reset(engine)
    (answer,) = engine.run(announced("c", prompt, size=2))
    assert answer.computed_prompt_tokens == 1
    assert answer.tokens == expected_answer(prompt, 1)


def test_request_waits_for_chunks_announced_in_another_tp_size(
    start: StartEngine, tmp_path: Path
) -> None:
    prompt, p = LONG[: 5 * BLOCK + 2], tmp_path / "p"
    serve(start(num_blocks=NUM_BLOCKS, folder=p), prompt, max_tokens=1)
    for path in objects(p):
        in_two(path, p)
    engine = reader(start, tmp_path)
    engine.add(announced("d", prompt, size=2))
    for _ in range(20):
        engine.step()
    assert not engine.answers["d"].tokens
    shutil.copytree(p / "store", tmp_path / "store", dirs_exist_ok=True)
    engine.run_out()
    assert engine.answers["d"].computed_prompt_tokens == 1
    assert engine.answers["d"].tokens == expected_answer(prompt, 1)


def announced(name: str, prompt: list[int], size: int) -> Request:
    params = {"kvshare": {"num_tokens": len(prompt) - 1, "size": size}}
    return make_request(name, prompt, kv_transfer_params=params)


def reset(engine: ToyEngine) -> None:
    """Empty the engine's local prefix cache."""
    assert engine.scheduler.reset_prefix_cache()


def test_reader_of_another_tp_size_saves_only_computed_chunks(
    start: StartEngine, tmp_path: Path
) -> None:
    prompt = LONG[: 5 * BLOCK]
    write(start, tmp_path, prompt, lambda _: True)
    mark(tmp_path, 2)
    assert not objects(tmp_path)
    longer = [*prompt, *range(2 * BLOCK)]
    answer = serve(reader(start, tmp_path), longer)
    assert answer.computed_prompt_tokens == 2 * BLOCK
    assert len(objects(tmp_path)) >= 2
    chunks = chunks_for(make_request("w", longer))
    assert {path.name for path in objects(tmp_path)}.isdisjoint(
        stored(tmp_path, chunk, "t0of2").name.replace("of2", "of1") for chunk in chunks[:5]
    )
