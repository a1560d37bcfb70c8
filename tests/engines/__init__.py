# SPDX-License-Identifier: Apache-2.0
"""Tests over real vLLM engines: tens of seconds each."""
