# SPDX-License-Identifier: Apache-2.0
"""Ways to damage an object in a folder."""

from pathlib import Path

from ecshare.store.format import PROLOGUE_BYTES


def replace(path: Path, body: bytes | bytearray | memoryview) -> None:
    """Write a new file, since a host cache may have a hard link to the old one."""
    path.unlink()
    path.write_bytes(body)


def flip_a_payload_bit(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[PROLOGUE_BYTES + 5] ^= 4
    replace(path, body)


def truncate(path: Path) -> None:
    replace(path, path.read_bytes()[:-1])


def empty(path: Path) -> None:
    replace(path, b"")
