# SPDX-License-Identifier: Apache-2.0
"""What the models of vLLM's registry declare, and what kvshare makes of their layers.

Needs no weights, no network and no device. `python -m lab.registry.page` writes it down.
"""
