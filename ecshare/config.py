# SPDX-License-Identifier: Apache-2.0
"""The options of ECShareConnector: what the user writes into `ec_connector_extra_config`."""

from ecshare.store.config import StoreConfig

OPTIONS_PATH = "ec_connector_extra_config"


class EncoderConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the encoder-cache connector; today those that both connectors take."""
