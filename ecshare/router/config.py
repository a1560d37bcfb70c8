# SPDX-License-Identifier: Apache-2.0
"""The router's options, in one frozen `RouterConfig`."""

from pathlib import Path
from typing import Literal

from msgspec import Struct

from ecshare.router.addresses import Network
from ecshare.router.secret import Secret
from ecshare.store.config import StoreConfig

MIB = 1024 * 1024


class AdminConfig(Struct, frozen=True):
    """The operator's own port. There is none without a key."""

    host: str
    port: int
    key: Secret


class RouterConfig(Struct, frozen=True, kw_only=True):
    """All that an operator can set. Urls have the form that `engine_url` returns."""

    decoders: tuple[str, ...]
    encoders: tuple[str, ...] = ()
    prefillers: tuple[str, ...] = ()
    engines_file: Path | None = None
    """The file that the engines come from, if it is to be read again when it changes."""
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 128 * MIB
    max_media_bytes: int = 128 * MIB
    max_in_flight_bytes: int = 2048 * MIB
    max_index_bytes: int = 128 * MIB
    prefill: Literal["needed", "always"] = "needed"
    max_new_tokens: int = 250
    max_items: int = 64
    max_connections: int = 4096
    hand_over: Literal["streamed", "after"] = "streamed"
    forward_headers: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    allow_media_domains: tuple[str, ...] = ()
    allow_media_networks: tuple[Network, ...] = ()
    media_proxy_resolves: bool = False
    timeout_s: float = 600.0
    client_timeout_s: float = 20.0
    first_byte_timeout_s: float = 60.0
    stage_timeout_s: float = 120.0
    media_timeout_s: float = 20.0
    cool_down_s: float = 5.0
    balance: Literal["affinity", "load"] = "affinity"
    when_overloaded: Literal["refuse", "decode"] = "refuse"
    retry_share: float = 0.2
    max_encodes: int = 0
    max_prefills: int = 0
    max_decodes: int = 0
    drain_s: float = 25.0
    status_key: Secret | None = None
    admin: AdminConfig | None = None
    adapter_encoders: Literal["listed", "base"] = "listed"
    access_log: bool = False
    otlp_traces_endpoint: str | None = None
    store: StoreConfig | None = None
    router_token: str = ""
    """The secret by which engines behind a RouterGate recognise this router."""
