# SPDX-License-Identifier: Apache-2.0
"""What a look-up buffer's entries are called, and which of them match some tokens.

An entry's name says how its tokens begin, how many they are and what they are, as hashes: most of
what does not match is ruled out by listing names.

    <object key of the first tokens>.<number of tokens, hex>-<digest of all tokens>-<random>

Of an entry with more tokens than are asked for the name does not tell. Its tokens lie in front of
its tensors, so that they can be read without them.

    byte 0     8 bytes, little endian: n, the number of tokens of interest
    byte 8     n * 8 bytes: these tokens, signed, little endian
    then       a safetensors file with the tensors, by NAMES
"""

import asyncio
import hashlib
import random
import re
import secrets
import struct
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from itertools import compress, groupby
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ecshare.store.errors import ObjectCorrupt, ObjectMissing
from ecshare.store.format import PROLOGUE_BYTES
from ecshare.store.keys import Kind, namespace_prefix, object_key
from ecshare.store.objects import Buffer, ObjectStore

NAMES = ("input_tokens", "roi", "key", "value", "hidden")
# Entries with fewer tokens lie under one name.
_FIRST_TOKENS = 16
_SHORT = "short"
_COUNT = struct.Struct("<Q")
_READS = 16  # of tokens at once
_NAME = re.compile(r".*/([0-9a-f]{64})\.([0-9a-f]{1,8})-([0-9a-f]{12})-[0-9a-f]{10}")

# What safetensors and torch raise for files of others, of dtypes and shapes they do not know.
_ODD_FILE = (SafetensorError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)


class Entry(NamedTuple):
    """One entry's name, taken apart."""

    key: str
    num_tokens: int
    digest: str

    @classmethod
    def new(cls, namespace: str, tokens: Sequence[int]) -> "Entry":
        """Name a new entry of these tokens of interest."""
        digest = _digest(tokens)
        part = f"{len(tokens):x}-{digest}-{secrets.token_hex(5)}"
        return cls(object_key(Kind.KV, namespace, _anchor(tokens), part), len(tokens), digest)

    def covers(self, tensors: Sequence[Tensor], wanted: Sequence[int] | None) -> bool:
        """Whether the entry with these tensors matches, and not by its name alone."""
        input_tokens, roi = tensors[0], tensors[1]
        if input_tokens.shape != roi.shape or input_tokens.ndim != 1:
            return False
        try:
            own = input_tokens[roi.bool()].tolist()
        except RuntimeError:  # of a dtype that torch can do little with
            return False
        common = min(len(own), len(wanted)) if wanted is not None else 0
        return wanted is None or (common > 0 and own[:common] == list(wanted[:common]))


async def matches(
    store: ObjectStore, namespace: str, wanted: Sequence[int] | None
) -> AsyncIterator[Entry]:
    """Yield the entries that may match `wanted`, the best first; None: all, in random order."""
    found = [entry async for entry in _listed(store, namespace, wanted)]
    random.shuffle(found)  # takers that come at the same moment shall not all try the same one
    if wanted is None:
        for entry in found:
            yield entry
        return
    ranked = [(rank, entry) for entry in found if (rank := _rank(entry, wanted))]
    ranked.sort(key=lambda pair: pair[0], reverse=True)
    by_length = groupby((entry for _, entry in ranked), lambda each: each.num_tokens > len(wanted))
    for _, alike in by_length:  # those of the length asked for, the longer ones, the shorter ones
        several = [*alike]
        for start in range(0, len(several), _READS):
            some = several[start : start + _READS]
            fits = await asyncio.gather(*(_begins(store, entry, wanted) for entry in some))
            for entry in compress(some, fits):
                yield entry


def _rank(entry: Entry, wanted: Sequence[int]) -> tuple[int, int] | None:
    """How good a match is, as far as the name tells; None: it is none."""
    if entry.num_tokens > len(wanted):
        return (len(wanted), -entry.num_tokens)  # only its tokens tell
    if entry.digest != _digest(wanted[: entry.num_tokens]):
        return None
    return (entry.num_tokens, 0)


async def _begins(store: ObjectStore, entry: Entry, wanted: Sequence[int]) -> bool:
    """Whether a longer `entry` begins with `wanted`, as its front says, which may be damaged."""
    if entry.num_tokens <= len(wanted):
        return True  # its name has told
    front = _Front(PROLOGUE_BYTES + _COUNT.size, _raw(wanted))
    try:
        await store.get(entry.key, front)
    except ObjectMissing:
        return False
    except (ObjectCorrupt, _AllIsKnown):
        pass
    return front.is_alike


class _AllIsKnown(Exception):  # noqa: N818 — no error: it ends a transfer
    """The rest of an object is of no interest."""


class _Front:
    """A Sink that compares an object with `wanted`, from byte `start` on; it takes no more of it.

    An object that is too short passes: reading it whole shows that.
    """

    def __init__(self, start: int, wanted: bytes) -> None:
        self.is_alike = True
        self._start = start
        self._wanted = memoryview(wanted)
        self._num_missing = len(wanted)
        self._lock = threading.Lock()

    def begin(self, num_bytes: int) -> None:
        """See Sink."""
        if num_bytes < self._start + len(self._wanted):
            raise ObjectCorrupt(f"corrupt object: {num_bytes} bytes are too few")

    def write(self, offset: int, piece: Buffer) -> None:
        """See Sink. Raises _AllIsKnown."""
        view, end = memoryview(piece).cast("B"), self._start + len(self._wanted)
        first, last = max(offset, self._start), min(offset + len(view), end)
        if first < last:
            wanted = self._wanted[first - self._start : last - self._start]
            is_alike = view[first - offset : last - offset] == wanted
            with self._lock:
                self.is_alike &= is_alike
                self._num_missing -= last - first
        if not self._num_missing or not self.is_alike:
            raise _AllIsKnown


async def _listed(
    store: ObjectStore, namespace: str, wanted: Sequence[int] | None
) -> AsyncIterator[Entry]:
    prefixes, anchors = [namespace_prefix(Kind.KV, namespace)], set[str]()
    if wanted is not None and len(wanted) >= _FIRST_TOKENS:
        names = {object_key(Kind.KV, namespace, name) for name in (_anchor(wanted), _SHORT)}
        prefixes = sorted({name.rpartition("/")[0] + "/" for name in names})
        anchors = {name.rpartition("/")[2] for name in names}
    for below in prefixes:
        async with aclosing(store.list(below)) as listing:  # type: ignore[type-var]
            async for info in listing:
                said = _NAME.fullmatch(info.key)
                if said and (not anchors or said[1] in anchors):
                    yield Entry(info.key, int(said[2], 16), said[3])


def pack(tokens: Sequence[int], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return an entry's tokens of interest and its tensors as bytes."""
    packed = bytearray(_COUNT.pack(len(tokens)) + _raw(tokens))
    packed += as_file(tensors)
    return torch.frombuffer(packed, dtype=torch.uint8)


def unpack(packed: Tensor) -> list[Tensor]:
    """Return the tensors that `pack` was given, by NAMES. ObjectCorrupt: it is something else."""
    if packed.dtype != torch.uint8 or packed.ndim != 1 or len(packed) < _COUNT.size:
        raise ObjectCorrupt(f"an entry is no row of bytes: {packed.dtype} {list(packed.shape)}")
    raw = memoryview(packed.numpy())  # type: ignore[arg-type]
    (count,) = _COUNT.unpack_from(raw)
    tensors = from_file(raw[_COUNT.size + 8 * count :])
    if missing := [name for name in NAMES if name not in tensors]:
        raise ObjectCorrupt(f"an entry holds no KV cache: no {', '.join(missing)}")
    return [tensors[name] for name in NAMES]


def as_file(tensors: Mapping[str, Tensor]) -> bytes:
    """Return `tensors` as the bytes of a safetensors file. They may share memory."""
    owned, seen = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        each = tensor.detach().cpu().contiguous()
        memory = each.untyped_storage().data_ptr()
        owned[name] = each.clone() if memory in seen else each
        seen.add(memory)
    return save(owned)


def from_file(raw: memoryview) -> dict[str, Tensor]:
    """Return what `as_file` was given. ObjectCorrupt: it is something else."""
    try:
        return load(raw.tobytes())
    except _ODD_FILE as exc:
        words = str(exc)[:200].partition("\n")[0]  # torch's may be pages
        raise ObjectCorrupt(f"this is no file of tensors: {words}") from exc


def _anchor(tokens: Sequence[int]) -> str:
    return _SHORT if len(tokens) < _FIRST_TOKENS else _digest(tokens[:_FIRST_TOKENS])


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(_raw(tokens)).hexdigest()[:12]


def _raw(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}q", *tokens)
