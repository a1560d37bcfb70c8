# SPDX-License-Identifier: Apache-2.0
"""What both vLLM plug-ins share: versions, model facts, ranks, metrics, registration."""
