# SPDX-License-Identifier: Apache-2.0
"""Hostile input of every kind, by the thousand: see running.py."""
