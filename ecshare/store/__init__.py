# SPDX-License-Identifier: Apache-2.0
"""Immutable objects in folders, buckets and host memory. Needs no torch and no vLLM."""
