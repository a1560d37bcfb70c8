# SPDX-License-Identifier: Apache-2.0
"""`gated://`: a store in memory whose operations can be blocked, as by a slow network."""

import threading
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

GIVE_UP_S = 30.0


class GatedFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Operations in `closed`, or `closed` for one path, wait; those in `broken` fail."""

    protocol = ("gated",)
    store: dict[str, Any] = {}  # noqa: RUF012 — fsspec's own way: one store for all instances
    pseudo_dirs = [""]  # noqa: RUF012
    closed: set[str] = set()  # noqa: RUF012
    broken: set[str] = set()  # noqa: RUF012
    failed = 0  # operations
    changed = threading.Condition()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("gated://")))

    @classmethod
    def pass_gate(cls, operation: str, path: str) -> None:
        one = f"{operation} {path.rpartition('/')[2]}"
        with cls.changed:
            cls.changed.wait_for(lambda: not {operation, one} & cls.closed, GIVE_UP_S)
        if {operation, one} & cls.broken:
            cls.failed += 1
            raise OSError(f"{operation}: the network is down")

    @classmethod
    def close_gate(cls, *operations: str) -> None:
        with cls.changed:
            cls.closed |= set(operations)

    @classmethod
    def open_gate(cls, operation: str) -> None:
        with cls.changed:
            cls.closed.discard(operation)
            cls.changed.notify_all()

    @classmethod
    def open_gates(cls) -> None:
        with cls.changed:
            cls.closed.clear()
            cls.changed.notify_all()

    @classmethod
    def reset(cls) -> None:
        cls.open_gates()
        cls.broken.clear()
        cls.failed = 0
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        self.pass_gate("get", path)
        return bytes(super().cat_file(path, start, end, **kwargs))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.pass_gate("put", path)
        super().pipe_file(path, value, mode=mode, **kwargs)

    def exists(self, path: str, **kwargs: Any) -> bool:
        self.pass_gate("exists", path)
        return bool(super().exists(path, **kwargs))

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.pass_gate("move", path2)
        super().mv(path1, path2, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self.pass_gate("exists", path)
        return super().info(path, **kwargs)


fsspec.register_implementation("gated", GatedFileSystem, clobber=True)
