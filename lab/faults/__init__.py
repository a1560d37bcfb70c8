# SPDX-License-Identifier: Apache-2.0
"""A proxy that delays traffic."""
