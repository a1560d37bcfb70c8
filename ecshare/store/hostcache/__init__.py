# SPDX-License-Identifier: Apache-2.0
"""Verified objects on this host, shared by all processes of one user, within a byte budget."""
