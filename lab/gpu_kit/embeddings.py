# SPDX-License-Identifier: Apache-2.0
"""Checks of embeddings: from the encoder cache to the store and back."""

import torch

from lab.gpu_kit.kit import Bench, Check
from lab.gpu_kit.layouts import DTYPES, bits
from lab.gpu_kit.workers import MIB, EncoderHost, drawn

_SHAPE = (1000, 64)


def embeddings_are_unchanged_in_every_dtype(bench: Bench) -> None:
    """A loaded embedding has the saved bytes. Of a view, the store has its own elements only."""
    store = bench.folder()
    embeddings = {str(dtype): drawn(*_SHAPE, dtype, bench.device) for dtype in DTYPES}
    embeddings["a view"] = drawn(64, 1000, torch.bfloat16, bench.device).T
    with EncoderHost(bench, store) as writer:
        for name, embedding in embeddings.items():
            writer.encode(name, embedding)
        writer.wait_for("saved", len(embeddings))
    with EncoderHost(bench, store) as reader:
        for name, embedding in embeddings.items():
            reader.load(name)
            bench.finish()
            found = reader.cache[name]
            assert (found.dtype, found.device) == (embedding.dtype, embedding.device)
            assert torch.equal(bits(found), bits(embedding.contiguous())), name


def embedding_saves_do_not_wait_for_the_device(bench: Bench) -> None:
    """A save blocks neither the worker thread nor vLLM's later kernels. It stores what earlier
    kernels write, although they have not begun; the encoder cache may release the tensor meanwhile.
    """
    store = bench.folder()
    computed = drawn(*_SHAPE, torch.bfloat16, bench.device)
    with EncoderHost(bench, store) as writer:
        for number, block in enumerate(bench.rounds()):
            embedding = torch.zeros_like(computed)
            with block:
                embedding.copy_(computed, non_blocking=True)
                writer.encode(str(number), embedding)
                writer.counts()
                del embedding
                writer.cache.clear()
        writer.wait_for("saved", 2)
    with EncoderHost(bench, store) as reader:
        reader.load("1")
        bench.finish()
        assert torch.equal(bits(reader.cache["1"]), bits(computed))


def embedding_loads_do_not_wait_for_the_device(bench: Bench) -> None:
    """Kernels that are launched after the hook read the embedding, even if the encoder cache
    releases it and other loads are ordered before they begin.
    """
    names = [str(number) for number in range(4)]
    with EncoderHost(bench, bench.folder()) as host:
        embeddings = [drawn(*_SHAPE, torch.bfloat16, bench.device) for _ in names]
        for name, embedding in zip(names, embeddings, strict=True):
            host.encode(name, embedding)
        host.wait_for("saved", len(names))
        for block in bench.rounds():
            host.cache.clear()
            used = [torch.zeros_like(each) for each in embeddings]
            with block:
                for name, read in zip(names, used, strict=True):
                    host.load(name)
                    read.copy_(host.cache.pop(name), non_blocking=True)
            bench.finish()
            for read, embedding in zip(used, embeddings, strict=True):
                assert torch.equal(bits(read), bits(embedding))


def full_device_memory_drops_only_one_save(bench: Bench) -> None:
    """To save a view the device copies it; without memory for the copy, that save is dropped."""
    bench.needs_gpu()
    with EncoderHost(bench, bench.folder(), buffer_bytes=256 * MIB) as host:
        view = drawn(1024, 96 * 1024, torch.uint8, bench.device).T  # 96 MiB
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(bench.device).total_memory
        room = torch.cuda.memory_reserved(bench.device) + 32 * MIB
        torch.cuda.set_per_process_memory_fraction(room / total, bench.device)
        try:
            host.encode("large", view)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, bench.device)
        host.wait_for("dropped", 1)
        host.encode("small", drawn(*_SHAPE, torch.bfloat16, bench.device))
        host.wait_for("saved", 1)
        assert host.counts()["items/dropped"] == 1


CHECKS: tuple[Check, ...] = (
    embeddings_are_unchanged_in_every_dtype,
    embedding_saves_do_not_wait_for_the_device,
    embedding_loads_do_not_wait_for_the_device,
    full_device_memory_drops_only_one_save,
)
