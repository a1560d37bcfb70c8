# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV interfaces of the time before V1: the connector, its buffers and its pipes."""
