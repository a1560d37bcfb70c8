# SPDX-License-Identifier: Apache-2.0
"""Names of a look-up buffer's entries, and which of them match given tokens.

The name of an entry contains its number of tokens and hashes of its first tokens and of all of
them. So listing names rules out most entries that do not match.

    <object key of the first tokens>.<number of tokens, hex>-<digest of all tokens>-<random>

The name cannot tell whether an entry with more tokens than the query matches, so such an entry is
read. An entry is a safetensors file with the tensors, by NAMES.
"""

import hashlib
import random
import re
import secrets
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ecshare.store.errors import ObjectCorrupt
from ecshare.store.keys import Key, Kind, namespace_prefix, object_key
from ecshare.store.objects import ObjectStore

NAMES = ("input_tokens", "roi", "key", "value", "hidden")
# Entries with fewer tokens share one name.
_FIRST_TOKENS = 16
_SHORT = "short"
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
    for _, entry in ranked:
        yield entry


def _rank(entry: EntryName, wanted: Sequence[int]) -> tuple[int, int] | None:
    """Return how good a match is, as far as the name tells. None: no match."""
    if entry.num_tokens > len(wanted):
        return (len(wanted), -entry.num_tokens)  # only its tokens can tell
    if entry.digest != _digest(wanted[: entry.num_tokens]):
        return None
    return (entry.num_tokens, 0)


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


def pack(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the tensors of an entry as bytes."""
    return torch.frombuffer(bytearray(as_file(tensors)), dtype=torch.uint8)


def unpack(packed: Tensor) -> list[Tensor]:
    """Return the tensors that `pack` was given, in the order of NAMES.

    Raises:
        ObjectCorrupt: `packed` is something else.
    """
    if packed.dtype != torch.uint8 or packed.ndim != 1:
        raise ObjectCorrupt(f"an entry is not a row of bytes: {packed.dtype} {list(packed.shape)}")
    tensors = from_file(packed)
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


def from_file(packed: Tensor) -> dict[str, Tensor]:
    """Return the tensors of the file whose bytes are `packed`, as `as_file` has made it.

    Raises:
        ObjectCorrupt: it is something else.
    """
    try:
        return load(packed.numpy().tobytes())
    except _MALFORMED as exc:
        words = str(exc)[:200].partition("\n")[0]  # torch's messages may be pages long
        raise ObjectCorrupt(f"not a safetensors file: {words}") from exc


def _prefix_name(tokens: Sequence[int]) -> str:
    return _SHORT if len(tokens) < _FIRST_TOKENS else _digest(tokens[:_FIRST_TOKENS])


def _digest(tokens: Sequence[int]) -> str:
    raw = struct.pack(f"<{len(tokens)}q", *tokens)
    return hashlib.sha256(raw).hexdigest()[:12]
