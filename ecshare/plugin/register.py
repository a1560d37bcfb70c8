# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point: registers the connectors by their short names."""

from ecshare.plugin.compat import register_once


def register() -> None:
    """Register `ECShareConnector` and `KVShareConnector` with vLLM's factories.

    vLLM calls this in every process, in some twice. The connectors themselves are imported only
    when an engine asks for one by name.
    """
    # Imported here, because vLLM itself is still being imported when it loads entry points.
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register_once(ECConnectorFactory, "ECShareConnector", "ecshare.connector")
    register_once(KVConnectorFactory, "KVShareConnector", "kvshare.connector")
