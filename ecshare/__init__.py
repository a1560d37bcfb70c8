# SPDX-License-Identifier: Apache-2.0
"""Share vision embeddings between vLLM engines through object storage.

Importing the package does nothing: no vLLM, no torch, no handlers, no environment reads.
vLLM loads `ecshare.connector.ECShareConnector`; `kvshare` is the same for KV blocks.
"""

__version__ = "0.1.0"
