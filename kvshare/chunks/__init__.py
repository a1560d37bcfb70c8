# SPDX-License-Identifier: Apache-2.0
"""What a chunk of KV is: its key, its layer sets and shards, and the facts that name it."""
