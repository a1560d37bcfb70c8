# SPDX-License-Identifier: Apache-2.0
"""A secondary tier for vLLM's own KV offloading. Experimental, as vLLM's interface is.

Users name this package in vLLM's options: `"module_path": "kvshare.tier"`.
"""

from kvshare.tier.manager import KVShareTier

__all__ = ["KVShareTier"]
