# SPDX-License-Identifier: Apache-2.0
"""What a store needs besides loads and saves: start-up, renewal, manifests, removal."""
