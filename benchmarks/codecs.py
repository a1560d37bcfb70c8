# SPDX-License-Identifier: Apache-2.0
"""Fewer bytes for KV: without loss (`compression`), and with 8-bit floats (`stored_dtype`).

It measures how many bytes are left, the cost on one core, and the effect on a prompt that is stored
and loaded: with an imaginary store in simulated time, the limits and threads of KVShareConnector
and the measured speeds. Other codecs need `pip install lz4 blosc2`; those that are not installed
are left out. MB are 10^6 bytes of KV before it is encoded.
"""

import asyncio
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import kv_samples
from benchmarks.measure import Readings, in_turn
from benchmarks.report import Report, Table, arguments, command_line
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal, unseal
from ecshare.store.keys import Key
from ecshare.transfer.client.priority import Admission, Priority
from ecshare.transfer.jobs import MAX_OBJECT_BYTES
from ecshare.transfer.packing import Packing
from kvshare.worker import float8
from lab.counted_time import CountedTime
from lab.throttled_store import Link, ThrottledStore

MODULE = "benchmarks.codecs"
MB = 1e6
AS_IT_IS, FP8, ZSTD = "as it is", "stored_dtype: fp8", "compression: zstd"
KEY = Key("kv/benchmark")
# 8B-class, as in load_or_compute.
CHUNK_BYTES, CHUNK_TOKENS = 33_554_432, 256
# As kvshare/worker/loads.py and the threads of ecshare/transfer/engine.py.
LOADING_BYTES, THREADS = 256 << 20, 2
TIMEOUT_S = 10.0
TURNS = 12
LINKS = {
    "1 connection of 80 MB/s": Link(80 * MB, 80 * MB, 0.03),
    "8 connections of 80 MB/s": Link(640 * MB, 80 * MB, 0.03),
    "2 GB/s, 80 MB/s each": Link(2000 * MB, 80 * MB, 0.03),
    "2 GB/s": Link(2000 * MB, 2000 * MB, 0.03),
}
PROMPTS = (1024, 8192)
_SPEED_NOTE = (
    "`of the bytes`: what is left of {:.0f} MB in bfloat16, drawn with a scale for each channel. "
    "One core, and one thread for torch, as in vLLM's workers on GPUs."
)
_RATIO_NOTE = (
    "What is left of the bytes of KV that small models with drawn weights compute in bfloat16. "
    "Trained models may differ."
)
_LOAD_NOTE = (
    "Seconds until all of a prompt of an 8B-class model is loaded: the first prompt after the "
    f"start, and the {TURNS}th, when the limits in flight have adapted; then, until the {TURNS}th "
    "is stored. Only the transfer, and encoding or decoding, take time."
)
_AGREEMENT_NOTE = (
    f"The next token at {kv_samples.COMPARED} positions after {kv_samples.PROMPT_TOKENS} random "
    "tokens, with KV that was stored as 8-bit floats, and with the KV itself; float32. The weights "
    "are drawn, so that many positions have no clear best token; `clear`: where the best two are "
    "at least 0.5 apart. `error`: of the logarithm of the best token's probability."
)


@dataclass(frozen=True)
class Codec:
    """One way to store KV. Both functions run on one thread."""

    name: str
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], object]
    num_bytes: Callable[[Any], int]


def main(words: Sequence[str]) -> None:
    """Measure, print, write the result files."""
    options = arguments(__doc__ or "", MODULE).parse_args(words)
    torch.set_num_threads(1)
    rounds = options.rounds or (1 if options.quick else 5)
    found = list(_codecs())
    settings = {"rounds": rounds, "codecs": "; ".join(each.name for each in found)}
    report = Report("codecs", command_line(MODULE, options), settings)
    numbers = kv_samples.drawn(2 if options.quick else 16, 16)
    speeds = _speeds(found, numbers, rounds)
    report.add(_speed_table(found, speeds, numbers.nbytes))
    report.add(_ratios(found, kv_samples.families(quick=options.quick)))
    report.add(_transfers(speeds, PROMPTS[:1] if options.quick else PROMPTS))
    report.add(_agreement(kv_samples.families(quick=options.quick), 1 if options.quick else 8))
    print(f"\nwritten: {report.write(options.results).name}")


# --- codecs ---


def _codecs() -> Iterator[Codec]:
    """Yield the codecs that are installed."""
    zstandard, lz4 = _module("zstandard"), _module("lz4.block")
    blosc2 = _module("blosc2")
    if zstandard is not None:
        to, back = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
        yield Codec("zstd", lambda kv: to.compress(_bytes(kv)), back.decompress, len)
        yield _packed()
    if lz4 is not None:
        yield _of_planes("planes, lz4", lz4.compress, lz4.decompress)
    if blosc2 is not None:
        for kind in ("SHUFFLE", "BITSHUFFLE"):
            yield _of_blosc(blosc2, kind)
    yield Codec(FP8, _to_float8, _from_float8, lambda packed: int(packed.nbytes))


def _module(name: str) -> Any:  # noqa: ANN401 — what is optional here has no types
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _bytes(numbers: Tensor) -> Any:  # noqa: ANN401 — numpy's array has no name here
    return numbers.view(torch.uint8).numpy().reshape(-1)


def _packed() -> Codec:
    """Return the codec of the option `compression`, including the checksum."""
    packing = Packing(MODULE)

    def encode(numbers: Tensor) -> memoryview:
        return memoryview(packing.pack(_sealed(numbers), KEY, None))

    def decode(packed: memoryview) -> object:
        sealed = unseal(packed, KEY, verify=False)
        body = packing.unpack(sealed, KEY, MAX_OBJECT_BYTES, None)
        return sealed.payload if body is None else body[PROLOGUE_BYTES:]

    return Codec(ZSTD, encode, decode, len)


@cache
def _sealed(numbers: Tensor) -> memoryview:
    """Return an object with these bfloat16 numbers, as in a slab."""
    octets = _bytes(numbers)
    body = np.empty(PROLOGUE_BYTES + len(octets), np.uint8)
    body[PROLOGUE_BYTES:] = octets
    seal(body.data, TensorSpec("BF16", tuple(numbers.shape)), KEY)
    return body.data


def _of_planes(name: str, compress: Any, decompress: Any) -> Codec:
    """Return a codec that compresses the exponents alone: all other bits are noise."""

    def encode(numbers: Tensor) -> tuple[bytes, Any]:
        bits = _bytes(numbers).view(np.uint16)
        pairs = ((bits << 1) | (bits >> 15)).view(np.uint8).reshape(-1, 2)
        return compress(np.ascontiguousarray(pairs[:, 1])), np.ascontiguousarray(pairs[:, 0])

    def decode(encoded: tuple[bytes, Any]) -> Any:
        exponents, rest = encoded
        pairs = np.empty((len(rest), 2), np.uint8)
        pairs[:, 1] = np.frombuffer(decompress(exponents), np.uint8)
        pairs[:, 0] = rest
        bits = pairs.reshape(-1).view(np.uint16)
        return ((bits >> 1) | (bits << 15)).view(np.uint8)

    return Codec(name, encode, decode, lambda encoded: len(encoded[0]) + len(encoded[1]))


def _of_blosc(blosc2: Any, kind: str) -> Codec:
    how = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "filters": [blosc2.Filter[kind]]}

    def encode(numbers: Tensor) -> bytes:
        packed: bytes = blosc2.compress2(_bytes(numbers).view(np.uint16), **how, nthreads=1)
        return packed

    name = f"blosc2, {kind.lower()}, zstd"
    return Codec(name, encode, lambda packed: blosc2.decompress2(packed, nthreads=1), len)


def _to_float8(numbers: Tensor) -> Tensor:
    out = _buffer((*numbers.shape[:-1], numbers.shape[-1] + 1), torch.uint8)
    float8.encode(numbers, out)
    return out


def _from_float8(packed: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    out = _buffer((*packed.shape[:-1], packed.shape[-1] - 1), dtype)
    float8.decode(packed, out)
    return out


def _changed(numbers: Tensor) -> Tensor:
    return _from_float8(_to_float8(numbers), numbers.dtype).clone()


@cache
def _buffer(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory that was used before, like the connector's."""
    return torch.empty(shape, dtype=dtype)


# --- measured speeds ---


@dataclass(frozen=True)
class Speed:
    """The speed of one codec: its ratio, and bytes per CPU second."""

    ratio: float
    encode: float
    decode: float


def _speeds(codecs: Sequence[Codec], numbers: Tensor, rounds: int) -> dict[str, Speed]:
    readings: Readings[tuple[str, str]] = Readings()
    ratios: dict[str, float] = {}
    for turn in range(rounds + 1):
        for codec in in_turn(codecs, turn):
            encoded, encode_s = _timed(codec.encode, numbers)
            decoded, decode_s = _timed(codec.decode, encoded)
            ratios[codec.name] = codec.num_bytes(encoded) / numbers.nbytes
            if turn:  # the first turn allocates memory that later ones reuse
                readings.add((codec.name, "encode"), encode_s)
                readings.add((codec.name, "decode"), decode_s)
            elif codec.name != FP8:
                assert bytes(decoded) == bytes(_bytes(numbers)), codec.name
    return {name: _speed(ratio, name, readings, numbers.nbytes) for name, ratio in ratios.items()}


def _speed(ratio: float, name: str, readings: Readings[tuple[str, str]], num_bytes: int) -> Speed:
    encode_s, decode_s = (readings.median((name, what)) for what in ("encode", "decode"))
    return Speed(ratio, num_bytes / encode_s, num_bytes / decode_s)


def _timed(work: Callable[[Any], Any], on: object) -> tuple[Any, float]:
    """Return the result, and the CPU seconds that this thread used."""
    began_s = time.thread_time()
    result = work(on)
    return result, time.thread_time() - began_s


def _speed_table(codecs: Sequence[Codec], speeds: dict[str, Speed], num_bytes: int) -> Table:
    columns = ["codec", "of the bytes", "encode MB/s", "decode MB/s"]
    columns += ["encode CPU s/GB", "decode CPU s/GB"]
    table = Table("Bytes and CPU time", columns, _SPEED_NOTE.format(num_bytes / MB))
    for codec in codecs:
        speed = speeds[codec.name]
        table.add(
            codec.name,
            speed.ratio,
            speed.encode / MB,
            speed.decode / MB,
            1e9 / speed.encode,
            1e9 / speed.decode,
        )
    return table


def _ratios(codecs: Sequence[Codec], families: Sequence[str]) -> Table:
    columns = ["KV of", *(codec.name for codec in codecs)]
    table = Table("Bytes of computed KV", columns, _RATIO_NOTE)
    for family in families:
        numbers = kv_samples.SmallModel(family, torch.bfloat16).kv()
        cells = [codec.num_bytes(codec.encode(numbers)) / numbers.nbytes for codec in codecs]
        table.add(family, *cells)
    return table


def _agreement(families: Sequence[str], num_prompts: int) -> Table:
    columns = ["model", "positions", "same token %", "same, clear %", "mean error", "worst error"]
    table = Table("Next tokens after KV in 8 bits", columns, _AGREEMENT_NOTE)
    for family in families:
        model = kv_samples.SmallModel(family, torch.float32)
        found = model.agreement(_changed, num_prompts)
        table.add(
            family,
            found.num_positions,
            found.equal_percent,
            found.far_percent,
            found.mean_error,
            found.worst_error,
        )
    return table


# --- the effect on a prompt ---


class Transfers:
    """One engine's loads and saves of whole prompts, one after the other."""

    def __init__(self, link: Link, speed: Speed) -> None:
        self._store = ThrottledStore(link)
        self._limits = Admission(TIMEOUT_S, grows=True)
        self._speed = speed
        self._threads = asyncio.Semaphore(THREADS)
        self._object_bytes = int(CHUNK_BYTES * speed.ratio)
        self._loading = asyncio.Semaphore(max(1, LOADING_BYTES // self._object_bytes))

    async def load(self) -> None:
        """Load one chunk."""
        async with self._loading:
            await self._move(Priority.LOAD)
            await self._work(self._speed.decode)

    async def save(self) -> None:
        """Store one chunk."""
        await self._work(self._speed.encode)
        await self._move(Priority.SAVE)

    async def _move(self, priority: Priority) -> None:
        async with self._limits.admitted(priority, self._object_bytes):
            await self._store.move(self._object_bytes)

    async def _work(self, rate: float) -> None:
        async with self._threads:
            await asyncio.sleep(CHUNK_BYTES / rate)


def _transfers(speeds: dict[str, Speed], prompts: Sequence[int]) -> Table:
    columns = ["store", "tokens", "codec", "first load s", "later load s", "save s"]
    table = Table("A prompt by an imaginary store", columns, _LOAD_NOTE)
    as_it_is = Speed(1.0, float("inf"), float("inf"))
    for name, link in LINKS.items():
        for num_tokens in prompts:
            for codec, speed in {AS_IT_IS: as_it_is, **speeds}.items():
                with asyncio.Runner(loop_factory=CountedTime) as runner:
                    figures = runner.run(_prompts(link, speed, num_tokens // CHUNK_TOKENS))
                table.add(name, num_tokens, codec, *figures)
    return table


async def _prompts(link: Link, speed: Speed, num_chunks: int) -> tuple[float, float, float]:
    """Return the seconds of the first load, of a later one and of a later save."""
    transfers = Transfers(link, speed)
    loads = [await _taken(transfers.load, num_chunks) for _ in range(TURNS)]
    saves = [await _taken(transfers.save, num_chunks) for _ in range(TURNS)]
    return loads[0], loads[-1], saves[-1]


async def _taken(one: Callable[[], Any], count: int) -> float:
    clock_s = asyncio.get_running_loop().time
    begun_s = clock_s()
    await asyncio.gather(*(one() for _ in range(count)))
    return clock_s() - begun_s


if __name__ == "__main__":
    main(sys.argv[1:])
