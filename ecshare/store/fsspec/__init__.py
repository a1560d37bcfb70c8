# SPDX-License-Identifier: Apache-2.0
"""Any file system of fsspec as a store."""
