# SPDX-License-Identifier: Apache-2.0
"""Tensors to bytes and back, off vLLM's threads: the transfer engine, staging and counters."""
