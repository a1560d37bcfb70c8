# SPDX-License-Identifier: Apache-2.0
"""Finds what the models of vLLM's registry declare, and what kvshare decides about their layers.

Needs no weights, no network and no device. `python -m lab.registry.page` writes a page of it.
"""
