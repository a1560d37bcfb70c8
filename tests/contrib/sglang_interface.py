# SPDX-License-Identifier: Apache-2.0
"""What SGLang asks of an embedding store: names and parameters, as its sources have them.

Read at commit 36fc4b7468fe9942929f5d2a9e7830ce0b33a70f of sgl-project/sglang, in
python/sglang/srt/mem_cache/embedding_store.py. A store is made by EmbeddingStoreFactory without
arguments, each list has an entry per hash, and each call returns a list of booleans.
"""

import abc
import sys
from types import ModuleType
from typing import Any

import pytest

ABSTRACT = {
    "batch_get": ("hashes", "ptrs", "sizes"),
    "batch_put": ("hashes", "ptrs", "sizes"),
    "batch_get_into_multi_buffers": ("hashes", "ptrs", "sizes"),
    "batch_put_from_multi_buffers": ("hashes", "ptrs", "sizes"),
    "batch_is_exist": ("hashes",),
}
INHERITED = {"register_buffer": ("tensor",), "get_key": ("mm_hash",)}
MODULE = "sglang.srt.mem_cache.embedding_store"


def install(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """Put a module with such an abstract class where a back end imports it; return the class."""

    def declared(self: Any, *args: Any) -> Any:
        raise NotImplementedError

    methods: dict[str, Any] = {name: abc.abstractmethod(declared) for name in ABSTRACT}
    methods |= {name: lambda *_: None for name in INHERITED}
    base = abc.ABCMeta("EmbeddingStore", (), methods)
    parts = MODULE.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(
            sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth]))
        )
    sys.modules[MODULE].EmbeddingStore = base  # type: ignore[attr-defined]
    return base
