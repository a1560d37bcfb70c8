# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM that worker halves import, for machines without vLLM.

The halves derive messages from vLLM's classes and compare types with them. Empty classes are enough
for that: nothing calls them.
"""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass
class _Stats:
    data: dict[str, Any] = field(default_factory=dict)


def _classes(*names: str) -> dict[str, Any]:
    return {name: type(name, (), {}) for name in names}


_SPECS = ("Attention", "ChunkedLocalAttention", "FullAttention", "KVCache", "MLAAttention")
_MODULES: Mapping[str, Mapping[str, Any]] = {
    "vllm": {"__version__": "none"},
    "vllm.config.cache": {"CacheDType": str},
    "vllm.distributed.ec_transfer.ec_connector.base": _classes(
        "ECConnectorMetadata", "ECConnectorWorkerMetadata"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base": _classes(
        "KVConnectorMetadata", "KVConnectorWorkerMetadata"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {"KVConnectorStats": _Stats},
    "vllm.v1.core.kv_cache_utils": _classes("generate_block_hash_extra_keys", "hash_block_tokens"),
    "vllm.v1.kv_cache_interface": {
        **_classes(*(f"{name}Spec" for name in (*_SPECS, "SlidingWindow", "Mamba"))),
        **_classes("UniformTypeKVCacheSpecs", "get_kv_quant_mode"),
        "KVQuantMode": type("KVQuantMode", (), {"NONE": 0, "FP8_PER_TENSOR": 1}),
    },
    "vllm.v1.request": _classes("Request"),
}


def has_vllm() -> bool:
    """Return whether vLLM is installed."""
    found = sys.modules.get("vllm") or importlib.util.find_spec("vllm")
    return getattr(found, "__version__", "") != "none" and found is not None


def provide() -> None:
    """Register modules with these names, unless vLLM is installed."""
    if has_vllm():
        return
    for path, names in _MODULES.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if sys.modules.get(name) is None:
                sys.modules[name] = ModuleType(name)
        vars(sys.modules[path]).update(names)
