# SPDX-License-Identifier: Apache-2.0
"""The encoder-cache connector: embeddings by the hash of their media."""
