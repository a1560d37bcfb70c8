# SPDX-License-Identifier: Apache-2.0
"""Keeps a store within its budget: notes of use, and a cleaner. Needs numpy, no torch, no vLLM."""
