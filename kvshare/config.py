# SPDX-License-Identifier: Apache-2.0
"""The options of KVShareConnector and of KVShareTier.

The user writes the first into `kv_connector_extra_config`, the second into one entry of the list
`secondary_tiers` there.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from ecshare.store.config import StoreConfig, parse
from ecshare.store.errors import ConfigError

OPTIONS_PATH = "kv_connector_extra_config"
CHUNK_TOKENS = 256

Tails = Literal["always", "salted", "never"]


class KVConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the KV connector: those that both connectors take, and its own."""

    chunk_tokens: Annotated[int, Meta(ge=1, le=65536)] | None = None
    """Tokens of one stored object: a whole number of vLLM's blocks; one block where that is larger.
    Left out: 256, or the next whole number of blocks. Engines share KV where it is the same."""

    tails: Tails = "always"
    """Whether the last, partly filled block of a prompt is stored and loaded. Where it is, whoever
    may ask an engine can guess the end of somebody's prompt token by token. `salted`: only of
    requests that carry a `cache_salt`, as a gateway sets one for each tenant. `never`: up to a
    block of each prompt is then computed again. The same on all engines."""

    def chunk_blocks(self, block_tokens: int) -> int:
        """Return how many blocks of `block_tokens` make a chunk.

        Raises:
            ConfigError: it is no whole number; names the option and the nearest ones that are.
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
    """A name for how the engine runs its model; it must not be empty. vLLM tells a tier the model's
    name, the cache's dtype and shape, and the parallel sizes, but not the revision, dtype,
    quantization, load format and overrides of the model, its processor's options or the attention
    backend. Engines share KV where the text is the same: change it when one of these changes, or
    the weights."""

    locality: Literal["LOCAL", "REMOTE"] | None = None
    """Where the store is, seen from this engine: what a request's `kv_load_tiers` may ask for."""


def parse_tier(raw: Mapping[str, Any], path: str) -> TierConfig:
    """Read the options of a tier, as `parse` does. An epoch is required.

    Raises:
        ConfigError: as `parse`, or `epoch` is missing.
    """
    if not raw.get("epoch"):
        raise ConfigError(
            f"{path}.epoch: missing. vLLM does not tell a tier how the engine runs its model "
            "(revision, dtype, quantization, overrides, processor options): give that a name, the "
            "same on engines that run it alike, and change it when something of it changes"
        )
    return parse(TierConfig, raw, path)
