# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point: makes the connectors known by their short names."""

from ecshare.plugin.compat import register_once


def register() -> None:
    """Register `ECShareConnector` and `KVShareConnector` with vLLM's factories.

    vLLM calls this in every process, in some twice. Nothing of the connectors is imported until
    one of them is asked for by name.
    """
    # Inside, because vLLM is still being imported when it collects entry points.
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register_once(ECConnectorFactory, "ECShareConnector", "ecshare.connector")
    register_once(KVConnectorFactory, "KVShareConnector", "kvshare.connector")
