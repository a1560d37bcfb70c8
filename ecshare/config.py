# SPDX-License-Identifier: Apache-2.0
"""The options of ECShareConnector: what the user writes into `ec_connector_extra_config`."""

from typing import Literal

from ecshare.store.config import StoreConfig

OPTIONS_PATH = "ec_connector_extra_config"


class EncoderConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the encoder-cache connector: those that both connectors take, and its own."""

    save: Literal["announced", "durable"] = "announced"
    """When an encoder's answer leaves. `announced`: at once, while its embeddings are still being
    stored; a consumer that is given the answer's `ec_transfer_params` waits for them. `durable`:
    when they are stored; the step is held up until then."""
