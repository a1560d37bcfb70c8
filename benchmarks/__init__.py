# SPDX-License-Identifier: Apache-2.0
"""Measurements of the parts of ecshare; see README.md beside this file."""
