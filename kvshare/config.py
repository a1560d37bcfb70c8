# SPDX-License-Identifier: Apache-2.0
"""The options of KVShareConnector and of KVShareTier.

Users write the options of the connector into `kv_connector_extra_config`, and those of the tier
into an entry of the list `secondary_tiers` there.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from ecshare.store.config import ConnectorConfig, StoreConfig, parse
from ecshare.store.errors import ConfigError

OPTIONS_PATH = "kv_connector_extra_config"
CHUNK_TOKENS = 256

Tails = Literal["always", "salted", "never"]


class KVConfig(ConnectorConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the KV connector: those that both connectors take, and its own."""

    chunk_tokens: Annotated[int, Meta(ge=1, le=65536)] | None = None
    """Tokens per stored object: a whole number of vLLM's blocks, or one block if that is larger.
    Default: 256, or the next whole number of blocks. Only engines with the same value share KV."""

    tails: Tails = "always"
    """Whether the last, partly filled block of a prompt is stored and loaded. If it is, a client
    can guess the end of another prompt token by token. `salted`: only for requests with a
    `cache_salt`, which a gateway sets for each tenant. `never`: up to a block of each prompt is
    computed again. Use the same value on all engines."""

    load: Literal["always", "if_faster"] = "if_faster"
    """Whether all KV that a look-up finds is loaded, or only as much as should load faster than
    this engine would compute it, by recent measurements of both. Less than a chunk that it computes
    in 5 ms is not looked up. KV that another engine announces is always loaded."""

    save_min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Prompts of which fewer tokens would be stored are not stored, unless another engine waits for
    them (see `save_after`)."""

    save_answers: bool = True
    """Whether the KV of answers is stored, not only that of prompts. The next turn of a
    conversation finds it."""

    stored_dtype: Literal["auto", "fp8"] = "auto"
    """How KV is stored: as it is in the cache, or as 8-bit floats, which are half as many bytes as
    a cache of 16 bits. Numbers then come back changed by up to a sixteenth, and answers may change.
    Saves and loads take more CPU time. States of hybrid models are stored as they are. See [KV in 8
    bits](kv.md#kv-in-8-bits). Only engines with the same value share KV."""

    compression: Literal["none", "zstd"] = "none"
    """Whether objects in the store are compressed, without loss: about 0.7 of the bytes of a cache
    of 16 bits, for more CPU time. States of hybrid models, and 8-bit floats, are stored as they
    are. It pays with stores of less than some 1 GB/s. `zstd` needs `pip install zstandard`, which
    the extra `zstd` brings. See [Compression](kv.md#compression). Only engines with the same value
    share KV."""

    def check_dtypes(self, cache_dtypes: Collection[Any], *, keeps_scales: bool = False) -> None:
        """Check that KV of these torch dtypes can be stored with these options.

        `keeps_scales`: whether the blocks hold scales too.

        Raises:
            ConfigError: it cannot; names the option.
        """
        is_small = keeps_scales or any(each.itemsize == 1 for each in cache_dtypes)
        if self.stored_dtype == "fp8" and is_small:
            raise ConfigError(
                f"{OPTIONS_PATH}.stored_dtype: 'fp8' is for caches of 16 or 32 bits, and this "
                "engine's cache has 8 or fewer. Leave the option out: objects are as small without"
            )

    def chunk_blocks(self, block_tokens: int) -> int:
        """Return the number of blocks of `block_tokens` tokens in a chunk.

        Raises:
            ConfigError: it is not a whole number; names the option and the nearest valid values.
        """
        if self.chunk_tokens is None:
            return -(-CHUNK_TOKENS // block_tokens)
        num_blocks, rest = divmod(self.chunk_tokens, block_tokens)
        if rest and num_blocks:
            raise ConfigError(
                f"{OPTIONS_PATH}.chunk_tokens: {self.chunk_tokens} tokens are no whole number of "
                f"blocks of {block_tokens} tokens; use {num_blocks * block_tokens} or "
                f"{(num_blocks + 1) * block_tokens}"
            )
        return max(1, num_blocks)


class TierConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the tier for vLLM's own offloading."""

    epoch: Annotated[str, Meta(min_length=1, max_length=128)]
    """A name for the way in which the engine runs its model; it must not be empty. vLLM gives a
    tier the model's name, the cache's dtype and shape, and the parallel sizes. It does not give the
    model's revision, dtype, quantization, load format and overrides, the processor's options, or
    the attention backend. Only engines with the same text share KV: change it when one of these, or
    the weights, change."""

    locality: Literal["LOCAL", "REMOTE"] | None = None
    """The place of the store, seen from this engine, for the `kv_load_tiers` of requests."""


def parse_tier(raw: Mapping[str, Any], path: str) -> TierConfig:
    """Parse the options of a tier, as `parse` does. An epoch is required.

    Raises:
        ConfigError: see `parse`; or `epoch` is missing.
    """
    if not raw.get("epoch"):
        raise ConfigError(
            f"{path}.epoch: missing. vLLM does not give a tier all options of the model (revision, "
            "dtype, quantization, overrides, processor options): give this set of options a name, "
            "the same on all engines that have it, and change the name when an option changes"
        )
    return parse(TierConfig, raw, path)
