# SPDX-License-Identifier: Apache-2.0
"""The stages of a request: encode, prefill, decode. Start with `pipeline`."""
