# SPDX-License-Identifier: Apache-2.0
"""Proxies that delay, damage and drop traffic."""
