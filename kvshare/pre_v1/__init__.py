# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV interfaces from before V1: the connector and its buffers."""
