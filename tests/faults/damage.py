# SPDX-License-Identifier: Apache-2.0
"""Damaged and unfit objects, to replace good ones in a folder."""

import time
from collections import deque
from collections.abc import Callable
from math import prod
from pathlib import Path

from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal, unseal
from lab.servers.processes import Server

GIB = 1 << 30

Shape = tuple[int, ...]


def truncated(whole: bytes) -> bytes:
    return whole[:-1]


def cut_in_the_header(whole: bytes) -> bytes:
    return whole[:100]


def empty(_: bytes) -> bytes:
    return b""


def flipped_in_the_payload(whole: bytes) -> bytes:
    return whole[:-1] + bytes([whole[-1] ^ 1])


def flipped_in_the_header(whole: bytes) -> bytes:
    at = whole.index(b"xxh3_128:") + 12
    return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


DAMAGE: list[Callable[[bytes], bytes]] = [
    truncated, cut_in_the_header, empty, flipped_in_the_payload, flipped_in_the_header,
]  # fmt: skip
# The dtype and shape of a well-formed object that no engine can use, by name of the defect.
UNFIT: dict[str, Callable[[Shape], tuple[str, Shape]]] = {
    "wrong dtype": lambda shape: ("F16", shape),
    "wrong count": lambda shape: ("F32", (shape[0] - 1, *shape[1:])),
    "wrong width": lambda shape: ("F32", (*shape[:-1], shape[-1] // 2)),
    "turned": lambda shape: ("F32", shape[::-1]),
    "flat": lambda shape: ("F32", (prod(shape),)),
    "one dimension more": lambda shape: ("F32", (1, *shape)),
}


def unfit(name: str, whole: bytes, key: str) -> bytes:
    """A sound object under `key` that no engine can use."""
    right = unseal(memoryview(whole), key).spec
    dtype, shape = UNFIT[name](right.shape)
    facts = TensorSpec(dtype, shape, right.attributes)
    made = memoryview(bytearray(PROLOGUE_BYTES + facts.num_bytes))
    seal(made, facts, key)
    return bytes(made)


# An engine that finds more damaged objects than this within a minute pauses their removal.
_MOST_A_MINUTE = 8
_replaced_s: deque[float] = deque(maxlen=_MOST_A_MINUTE)


def replace(path: Path, body: bytes) -> None:
    """Replace an object by `body`, as a new file: engines may have linked the old one.

    Waits so that engines do not pause the removal of damaged objects.
    """
    if len(_replaced_s) == _MOST_A_MINUTE:
        time.sleep(max(0.0, _replaced_s[0] + 61 - time.monotonic()))
    _replaced_s.append(time.monotonic())
    path.unlink()
    path.write_bytes(body)


def peak_memory_bytes(server: Server) -> int:
    """The sum of the peak memory of each of the server's processes."""
    total = 0
    for process in server.processes():
        status = Path(f"/proc/{process}/status").read_text()
        total += sum(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)
    return total * 1024
