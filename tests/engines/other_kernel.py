# SPDX-License-Identifier: Apache-2.0
"""KVShareConnector of an engine whose kernels use another block layout, loaded by
`kv_connector_module_path`.

The elements of its keys lie in the opposite order, in caches of the same shape. Queries are turned
too, so that it computes what other engines do. It stands for another release of vLLM.
"""

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Kernel

from kvshare.connector import KVShareConnector

_update, _forward = Kernel.do_kv_cache_update, Kernel.forward


def _update_turned(kernel: Kernel, layer: Any, key: Tensor, *rest: Any) -> None:
    _update(kernel, layer, key.flip(-1), *rest)


def _forward_turned(kernel: Kernel, layer: Any, query: Tensor, *rest: Any, **more: Any) -> Tensor:
    return _forward(kernel, layer, query.flip(-1), *rest, **more)


Kernel.do_kv_cache_update = _update_turned  # type: ignore
Kernel.forward = _forward_turned  # type: ignore


class OtherKernelConnector(KVShareConnector):
    """KVShareConnector; vLLM finds it here."""
