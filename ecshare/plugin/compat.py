# SPDX-License-Identifier: Apache-2.0
"""Differences between vLLM releases: names, hooks and private functions.

Only this module asks about them, and kvshare/compat.py about those of KV.
"""

import re
from functools import wraps
from typing import Any


def max_steps_in_flight(vllm_config: Any) -> int | None:
    """Return how many steps vLLM may have scheduled whose outputs it has not processed.

    None: other engines take part in each step, so a step never ends in this engine alone. This is
    so for data-parallel ranks of a mixture of experts. For other models vLLM sets the size to 1.
    """
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        return None
    of_any_release = int(parallel.pipeline_parallel_size) + 1
    return int(getattr(vllm_config, "max_concurrent_batches", of_any_release))


def has_input_cache(model_config: Any) -> bool:
    """Return whether vLLM caches the processed inputs of media. By default it does.

    False for a model without media.
    """
    media = option(model_config, "multimodal_config")
    return media is not None and option(media, "mm_processor_cache_gb") != 0


def names_media_by_request(vllm_config: Any) -> bool:
    """Return whether vLLM numbers media without a uuid, instead of hashing them.

    It does so if neither its input cache nor its prefix cache needs a hash.
    """
    has_prefixes = vllm_config.cache_config.enable_prefix_caching
    return not has_prefixes and not has_input_cache(vllm_config.model_config)


def is_named_by_request(feature: Any) -> bool:
    """Return whether the name of a media item may be such a number.

    Another engine, and this one after a restart, gives the same number to other items.
    """
    return re.search(rf"-{re.escape(feature.modality)}-[0-9]+$", feature.identifier) is not None


_encoder_resets: list[None] = []


def num_encoder_resets() -> int:
    """Return how often vLLM has reset its encoder cache in this process, since the first call.

    No hook tells a connector, and it gets no reference to the cache's manager.
    """
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    reset = EncoderCacheManager.reset
    if not hasattr(reset, "is_counted"):

        @wraps(reset)
        def counted(self: Any) -> None:
            _encoder_resets.append(None)
            reset(self)

        counted.is_counted = True  # type: ignore[attr-defined]
        EncoderCacheManager.reset = counted  # type: ignore[method-assign]
    return len(_encoder_resets)


def option(config: Any, name: str) -> Any:
    """Return the field `name` of a vLLM config object.

    None: the field is not set, this release has no such field, or `config` itself is None, as
    the multimodal config of a text model is.
    """
    return getattr(config, name, None)
