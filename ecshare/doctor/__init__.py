# SPDX-License-Identifier: Apache-2.0
"""Finds out why engines do not share. Needs neither torch nor vLLM."""
