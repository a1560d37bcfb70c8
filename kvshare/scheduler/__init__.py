# SPDX-License-Identifier: Apache-2.0
"""The half of the connector in vLLM's scheduler process."""
