# SPDX-License-Identifier: Apache-2.0
"""Names of a look-up buffer's entries, and which of them match given tokens.

The name of an entry contains its number of tokens and hashes of its first tokens and of all of
them. So listing names rules out most entries that do not match.

    <object key of the first tokens>.<number of tokens, hex>-<digest of all tokens>-<random>

The name cannot tell whether an entry with more tokens than the query matches. For that its tokens
precede its tensors, and can be read alone.

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
from ecshare.store.keys import Key, Kind, namespace_prefix, object_key
from ecshare.store.objects import Buffer, ObjectStore

NAMES = ("input_tokens", "roi", "key", "value", "hidden")
# Entries with fewer tokens share one name.
_FIRST_TOKENS = 16
_SHORT = "short"
_COUNT = struct.Struct("<Q")
_PARALLEL_READS = 16
_NAME = re.compile(r".*/([0-9a-f]{64})\.([0-9a-f]{1,8})-([0-9a-f]{12})-[0-9a-f]{10}")

# What safetensors and torch raise for malformed files, unknown dtypes and impossible shapes.
_MALFORMED = (SafetensorError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)


class EntryName(NamedTuple):
    """The parsed name of an entry."""

    key: Key
    num_tokens: int
    digest: str

    @classmethod
    def new(cls, namespace: str, tokens: Sequence[int]) -> "EntryName":
        """Return a new name for an entry with these tokens of interest."""
        digest = _digest(tokens)
        part = f"{len(tokens):x}-{digest}-{secrets.token_hex(5)}"
        return cls(object_key(Kind.KV, namespace, _prefix_name(tokens), part), len(tokens), digest)

    def covers(self, tensors: Sequence[Tensor], wanted: Sequence[int] | None) -> bool:
        """Return whether the entry with these tensors really matches, not only by its name."""
        input_tokens, roi = tensors[0], tensors[1]
        if input_tokens.shape != roi.shape or input_tokens.ndim != 1:
            return False
        try:
            own = input_tokens[roi.bool()].tolist()
        except RuntimeError:  # a dtype without these operations
            return False
        common = min(len(own), len(wanted)) if wanted is not None else 0
        return wanted is None or (common > 0 and own[:common] == list(wanted[:common]))


async def matches(
    store: ObjectStore, namespace: str, wanted: Sequence[int] | None
) -> AsyncIterator[EntryName]:
    """Yield the entries that may match `wanted`, the best first. None: all, in random order."""
    found = [entry async for entry in _listed(store, namespace, wanted)]
    random.shuffle(found)  # so that concurrent takers do not all try the same entry
    if wanted is None:
        for entry in found:
            yield entry
        return
    ranked = [(rank, entry) for entry in found if (rank := _rank(entry, wanted))]
    ranked.sort(key=lambda pair: pair[0], reverse=True)
    by_length = groupby((entry for _, entry in ranked), lambda each: each.num_tokens > len(wanted))
    for _, alike in by_length:  # longer entries must be read to know whether they match
        several = [*alike]
        for start in range(0, len(several), _PARALLEL_READS):
            some = several[start : start + _PARALLEL_READS]
            fits = await asyncio.gather(*(_starts_with(store, entry, wanted) for entry in some))
            for entry in compress(some, fits):
                yield entry


def _rank(entry: EntryName, wanted: Sequence[int]) -> tuple[int, int] | None:
    """Return how good a match is, as far as the name tells. None: no match."""
    if entry.num_tokens > len(wanted):
        return (len(wanted), -entry.num_tokens)  # only its tokens can tell
    if entry.digest != _digest(wanted[: entry.num_tokens]):
        return None
    return (entry.num_tokens, 0)


async def _starts_with(store: ObjectStore, entry: EntryName, wanted: Sequence[int]) -> bool:
    """Return whether a longer `entry` begins with `wanted`, by its stored tokens, unverified."""
    if entry.num_tokens <= len(wanted):
        return True  # its name was conclusive
    comparison = _PrefixComparison(PROLOGUE_BYTES + _COUNT.size, _token_bytes(wanted))
    try:
        await store.get(entry.key, comparison)
    except ObjectMissing:
        return False
    except (ObjectCorrupt, _Decided):
        pass
    return comparison.is_equal


class _Decided(Exception):  # noqa: N818 — not an error: it ends a transfer
    """The comparison is decided: the rest of the object need not be read."""


class _PrefixComparison:
    """A Sink that compares the bytes of an object from `start` on with `wanted`.

    It ends the transfer once the result is known. A truncated object counts as equal: reading it
    whole reports the damage.
    """

    def __init__(self, start: int, wanted: bytes) -> None:
        self.is_equal = True
        self._start = start
        self._wanted = memoryview(wanted)
        self._num_missing = len(wanted)
        self._lock = threading.Lock()

    def begin(self, num_bytes: int) -> None:
        """See Sink."""
        if num_bytes < self._start + len(self._wanted):
            raise ObjectCorrupt(f"corrupt object: {num_bytes} bytes are too few")

    def write(self, offset: int, piece: Buffer) -> None:
        """See Sink.

        Raises:
            _Decided: the result is known.
        """
        view, end = memoryview(piece).cast("B"), self._start + len(self._wanted)
        first, last = max(offset, self._start), min(offset + len(view), end)
        if first < last:
            wanted = self._wanted[first - self._start : last - self._start]
            is_equal = view[first - offset : last - offset] == wanted
            with self._lock:
                self.is_equal &= is_equal
                self._num_missing -= last - first
        if not self._num_missing or not self.is_equal:
            raise _Decided


async def _listed(
    store: ObjectStore, namespace: str, wanted: Sequence[int] | None
) -> AsyncIterator[EntryName]:
    prefixes, anchors = [namespace_prefix(Kind.KV, namespace)], set[str]()
    if wanted is not None and len(wanted) >= _FIRST_TOKENS:
        names = {object_key(Kind.KV, namespace, name) for name in (_prefix_name(wanted), _SHORT)}
        prefixes = sorted({name.rpartition("/")[0] + "/" for name in names})
        anchors = {name.rpartition("/")[2] for name in names}
    for below in prefixes:
        async with aclosing(store.list(below)) as listing:  # type: ignore[type-var]
            async for info in listing:
                parsed = _NAME.fullmatch(info.key)
                if parsed and (not anchors or parsed[1] in anchors):
                    yield EntryName(info.key, int(parsed[2], 16), parsed[3])


def pack(tokens: Sequence[int], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the tokens of interest and the tensors of an entry as bytes."""
    packed = bytearray(_COUNT.pack(len(tokens)) + _token_bytes(tokens))
    packed += as_file(tensors)
    return torch.frombuffer(packed, dtype=torch.uint8)


def unpack(packed: Tensor) -> list[Tensor]:
    """Return the tensors that `pack` was given, in the order of NAMES.

    Raises:
        ObjectCorrupt: `packed` is something else.
    """
    if packed.dtype != torch.uint8 or packed.ndim != 1 or len(packed) < _COUNT.size:
        raise ObjectCorrupt(f"an entry is not a row of bytes: {packed.dtype} {list(packed.shape)}")
    raw = memoryview(packed.numpy())  # type: ignore[arg-type]
    (count,) = _COUNT.unpack_from(raw)
    tensors = from_file(raw[_COUNT.size + 8 * count :])
    if missing := [name for name in NAMES if name not in tensors]:
        raise ObjectCorrupt(f"an entry holds no KV cache: no {', '.join(missing)}")
    return [tensors[name] for name in NAMES]


def as_file(tensors: Mapping[str, Tensor]) -> bytes:
    """Return `tensors` as the bytes of a safetensors file. The tensors may share memory."""
    owned, seen = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        each = tensor.detach().cpu().contiguous()
        memory = each.untyped_storage().data_ptr()
        owned[name] = each.clone() if memory in seen else each
        seen.add(memory)
    return save(owned)


def from_file(raw: memoryview) -> dict[str, Tensor]:
    """Return the tensors that `as_file` was given.

    Raises:
        ObjectCorrupt: `raw` is something else.
    """
    try:
        return load(raw.tobytes())
    except _MALFORMED as exc:
        words = str(exc)[:200].partition("\n")[0]  # torch's messages may be pages long
        raise ObjectCorrupt(f"not a safetensors file: {words}") from exc


def _prefix_name(tokens: Sequence[int]) -> str:
    return _SHORT if len(tokens) < _FIRST_TOKENS else _digest(tokens[:_FIRST_TOKENS])


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(_token_bytes(tokens)).hexdigest()[:12]


def _token_bytes(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}q", *tokens)
