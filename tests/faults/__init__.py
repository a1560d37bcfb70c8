# SPDX-License-Identifier: Apache-2.0
"""Real engines under load while their store fails, with real servers."""
