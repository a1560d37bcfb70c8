# SPDX-License-Identifier: Apache-2.0
"""Tests of the wheel: its requirements, and its behaviour where nothing else is installed."""
