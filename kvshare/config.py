# SPDX-License-Identifier: Apache-2.0
"""The options of KVShareConnector: what the user writes into `kv_connector_extra_config`."""

from ecshare.store.config import StoreConfig

OPTIONS_PATH = "kv_connector_extra_config"


class KVConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the KV connector; today those that both connectors take."""
