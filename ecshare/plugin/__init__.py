# SPDX-License-Identifier: Apache-2.0
"""Code that both connectors share: vLLM's versions, model facts, ranks, metrics, registration."""
