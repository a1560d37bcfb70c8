# SPDX-License-Identifier: Apache-2.0
"""A folder as a store: a local disk, NFS or another shared file system."""
