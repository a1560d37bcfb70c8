# SPDX-License-Identifier: Apache-2.0
"""The options of ECShareConnector: what the user writes into `ec_connector_extra_config`."""

from typing import Literal

from ecshare.store.config import ConnectorConfig

OPTIONS_PATH = "ec_connector_extra_config"


class EncoderConfig(ConnectorConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the encoder-cache connector: those that both connectors take, and its own."""

    save: Literal["announced", "durable"] = "announced"
    """When an encoder answers. `announced`: at once, while its embeddings are still being stored. A
    consumer that gets the answer's `ec_transfer_params` waits for them. `durable`: when they are
    stored. The step waits until then."""

    @property
    def promise_s(self) -> float:
        """Return the seconds for which a worker tries to load an embedding promised to vLLM."""
        return max(self.wait_s, 3 * self.io_timeout_s)
