# SPDX-License-Identifier: Apache-2.0
"""Upkeep of a store, besides loads and saves: start-up, renewal, manifests, removal."""
