# SPDX-License-Identifier: Apache-2.0
"""The engines: which there are, their state, their models, and the calls of them."""
