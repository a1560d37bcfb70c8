# SPDX-License-Identifier: Apache-2.0
"""Malformed entries of look-up buffers: unusable ones are refused as damaged."""

import contextlib
import json
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from ecshare.store.errors import ObjectCorrupt
from ecshare.store.keys import Key
from kvshare.pre_v1 import connector
from kvshare.pre_v1.index import NAMES, EntryName, pack, unpack
from tests.fuzz.running import fuzzed
from tests.fuzz.values import mutated, written

pytestmark = pytest.mark.fuzz

NUM_TOKENS, LAYERS, HEADS, HEAD_SIZE, BLOCK = 8, 2, 2, 4, 4
TENSORS = {
    "input_tokens": torch.arange(NUM_TOKENS),
    "roi": torch.ones(NUM_TOKENS, dtype=torch.bool),
    "key": torch.ones(LAYERS, NUM_TOKENS, HEADS, HEAD_SIZE),
    "value": torch.ones(LAYERS, NUM_TOKENS, HEADS, HEAD_SIZE),
    "hidden": torch.ones(NUM_TOKENS, 4),
}
WHOLE = pack(TENSORS).numpy().tobytes()
(HEADER_BYTES,) = struct.unpack_from("<Q", WHOLE)
HEADER = json.loads(WHOLE[8 : 8 + HEADER_BYTES])
BODY = WHOLE[8 + HEADER_BYTES :]
WANTED = [(0, 1, 2), tuple(range(NUM_TOKENS)), None]
ODD_DTYPES = [torch.bool, torch.uint8, torch.float32, torch.int64, torch.bfloat16]
ODD_DTYPES += [torch.float8_e4m3fn, torch.complex64, torch.uint16]
DTYPES = ["BF16", "F8_E4M3", "F64", "I64", "U8", "BOOL", "U64", "F4", "C64"]


@st.composite
def entries(draw: DrawFn) -> bytes:
    match draw(st.integers(0, 7)):
        case 6 | 7:
            name = draw(st.sampled_from(NAMES))
            shape = draw(st.lists(st.integers(0, 9), max_size=4))
            odd = torch.zeros(shape, dtype=draw(st.sampled_from(ODD_DTYPES)))
            return pack({**TENSORS, name: odd}).numpy().tobytes()
        case 0:
            at = draw(st.integers(0, len(WHOLE) - 1))
            return WHOLE[:at] + bytes([WHOLE[at] ^ 4]) + WHOLE[at + 1 :]
        case 1:
            return WHOLE[: draw(st.integers(1, len(WHOLE)))]
        case 2:
            counts = st.sampled_from([0, 1, 7, 9, 2**20, 2**61, 2**63, 2**64 - 1])
            return struct.pack("<Q", draw(counts)) + WHOLE[8:]
        case 3:
            return draw(st.binary(min_size=1, max_size=200))
        case 4:
            header = json.loads(json.dumps(HEADER))
            one = header[draw(st.sampled_from(NAMES))]
            one["dtype"] = draw(st.sampled_from(DTYPES))
            one["shape"] = draw(st.permutations(one["shape"]))
            return with_header(header)
        case _:
            return with_header(draw(mutated(HEADER)))


def with_header(header: Any) -> bytes:
    text = written(header)
    return struct.pack("<Q", len(text)) + text + BODY


@fuzzed(300)
@given(entries())
def test_malformed_entries_are_refused_or_parsed(raw: bytes) -> None:
    with contextlib.suppress(ObjectCorrupt):
        tensors = unpack(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        for wanted in WANTED:
            EntryName(Key("key"), NUM_TOKENS, "digest").covers(tensors, wanted)
        input_tokens, _, keys, values, hidden = tensors
        caches = [torch.zeros(2, 4, BLOCK, HEADS, HEAD_SIZE) for _ in range(LAYERS)]
        if input_tokens.ndim:
            slots = torch.arange(min(len(input_tokens), NUM_TOKENS))
            connector.write_slots(caches, slots, keys, values)
        connector.unpacked_states(hidden, BLOCK, torch.device("cpu"))


@fuzzed(100)
@given(st.binary(min_size=1, max_size=100) | entries())
def test_malformed_states_are_refused_or_parsed(raw: bytes) -> None:
    connector.unpacked_states(
        torch.frombuffer(bytearray(raw), dtype=torch.uint8), 4, torch.device("cpu")
    )
