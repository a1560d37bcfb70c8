# SPDX-License-Identifier: Apache-2.0
"""A tier for vLLM's own KV offloading: `"module_path": "kvshare.tier"` names this package.

Experimental, as vLLM's interface is.
"""

from kvshare.tier.manager import KVShareTier

__all__ = ["KVShareTier"]
