# SPDX-License-Identifier: Apache-2.0
"""What a look-up buffer's entries are called, and which of them match some tokens.

An entry's name says how its tokens begin, how many they are and what they are, as hashes: most of
what does not match is ruled out by listing names.

    <object key of the first tokens>.<number of tokens, hex>-<digest of all tokens>-<random>
"""

import hashlib
import random
import re
import secrets
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ecshare.store.errors import ObjectCorrupt
from ecshare.store.keys import Kind, namespace_prefix, object_key
from ecshare.store.objects import ObjectStore

NAMES = ("input_tokens", "roi", "key", "value", "hidden")
# Entries with fewer tokens lie under one name.
_FIRST_TOKENS = 16
_SHORT = "short"
_NAME = re.compile(r".*/([0-9a-f]{64})\.([0-9a-f]{1,8})-([0-9a-f]{12})-[0-9a-f]{10}")


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
        own = input_tokens[roi.bool()].tolist()
        common = min(len(own), len(wanted)) if wanted is not None else 0
        return wanted is None or (common > 0 and own[:common] == list(wanted[:common]))


async def matches(
    store: ObjectStore, namespace: str, wanted: Sequence[int] | None
) -> AsyncIterator[Entry]:
    """Yield the entries that may match `wanted`, the best first; None: all, in random order."""
    found = [entry async for entry in _listed(store, namespace, wanted)]
    random.shuffle(found)  # takers that come at the same moment shall not all try the same one
    if wanted is not None:
        ranked = [(rank, entry) for entry in found if (rank := _rank(entry, wanted))]
        ranked.sort(key=lambda pair: pair[0], reverse=True)
        found = [entry for _, entry in ranked]
    for entry in found:
        yield entry


def _rank(entry: Entry, wanted: Sequence[int]) -> tuple[int, int] | None:
    """How good a match is, as far as the name tells; None: it is none."""
    if entry.num_tokens > len(wanted):
        return (len(wanted), -entry.num_tokens)  # only its tokens tell
    if entry.digest != _digest(wanted[: entry.num_tokens]):
        return None
    return (entry.num_tokens, 0)


async def _listed(
    store: ObjectStore, namespace: str, wanted: Sequence[int] | None
) -> AsyncIterator[Entry]:
    prefix = namespace_prefix(Kind.KV, namespace)
    prefixes = [prefix]
    if wanted is not None and len(wanted) >= _FIRST_TOKENS:
        names = {object_key(Kind.KV, namespace, name) for name in (_anchor(wanted), _SHORT)}
        prefixes = sorted({name.rpartition("/")[0] + "/" for name in names})
    for below in prefixes:
        async with aclosing(store.list(below)) as listing:  # type: ignore[type-var]
            async for info in listing:
                if said := _NAME.fullmatch(info.key):
                    yield Entry(info.key, int(said[2], 16), said[3])


def pack(tensors: dict[str, Tensor]) -> Tensor:
    """Return an entry's tensors as the bytes of a safetensors file."""
    owned = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return torch.frombuffer(bytearray(save(owned)), dtype=torch.uint8)


def unpack(packed: Tensor) -> list[Tensor]:
    """Return what `pack` was given, in the order of NAMES. ObjectCorrupt: it is something else."""
    try:
        tensors = load(packed.numpy().tobytes())
        return [tensors[name] for name in NAMES]
    except (SafetensorError, KeyError, ValueError) as exc:
        raise ObjectCorrupt(f"an entry holds no KV cache: {exc}") from exc


def _anchor(tokens: Sequence[int]) -> str:
    return _SHORT if len(tokens) < _FIRST_TOKENS else _digest(tokens[:_FIRST_TOKENS])


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(array("q", tokens).tobytes()).hexdigest()[:12]
