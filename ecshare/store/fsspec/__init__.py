# SPDX-License-Identifier: Apache-2.0
"""Stores in any file system of fsspec."""
