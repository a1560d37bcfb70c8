# SPDX-License-Identifier: Apache-2.0
"""The vLLM release under test, and marks for what older releases lack."""

import pytest
from vllm import __version__

VLLM = tuple(int(part) for part in __version__.split(".")[:2])

HAS_ENCODER_METRICS = VLLM >= (0, 31)
needs_encoder_metrics = pytest.mark.skipif(
    not HAS_ENCODER_METRICS, reason="vLLM asks encoder-cache connectors for metrics since 0.31"
)
needs_v2_runner = pytest.mark.skipif(
    VLLM < (0, 32), reason="CPU engines on the V2 model runner are tried since vLLM 0.32"
)
CAN_GUESS = VLLM >= (0, 31)
needs_guesses = pytest.mark.skipif(
    not CAN_GUESS, reason="until 0.31 vLLM's CPU engines die of the first token they guess"
)
# Not tried with earlier releases, where P may look for an image only once.
ANNOUNCES_AT_EVERY_ENDPOINT = VLLM >= (0, 32)
TRIES_HYBRIDS = VLLM >= (0, 32)
needs_offered_states = pytest.mark.skipif(
    not TRIES_HYBRIDS, reason="engines with recurrent layers are tried since vLLM 0.32"
)
needs_comments = pytest.mark.skipif(
    VLLM < (0, 32), reason="vLLM keeps idle streams in use, by comments, since 0.32"
)
needs_hit_sources = pytest.mark.skipif(
    VLLM < (0, 32), reason="vLLM asks where cached tokens come from since 0.32"
)
needs_adapter_hashes = pytest.mark.skipif(
    VLLM < (0, 31), reason="until 0.31 vLLM's block hashes tell LoRA adapters apart by name alone"
)
# Earlier a request that waits for blocks to load into may block one whose load has ended.
loads_may_hang = pytest.mark.skipif(
    VLLM < (0, 31), reason="until 0.31 vLLM may wait for ever where loads fill its cache"
)
needs_packed_layouts = pytest.mark.skipif(
    VLLM < (0, 32), reason="vLLM packs layers of several shapes into one block since 0.32"
)
