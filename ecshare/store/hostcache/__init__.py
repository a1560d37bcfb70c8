# SPDX-License-Identifier: Apache-2.0
"""The host cache: verified objects, shared by all processes of one user, within a byte budget."""
