# SPDX-License-Identifier: Apache-2.0
"""The half of the encoder-cache connector in vLLM's scheduler process."""
