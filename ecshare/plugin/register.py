# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point: registers the connectors by their short names."""


def register() -> None:
    """Register `ECShareConnector` and `KVShareConnector` with vLLM's factories.

    vLLM calls this in every process, in some twice. The connectors themselves are imported only
    when an engine asks for one by name.
    """
    # Imported here, because vLLM itself is still being imported when it loads entry points.
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for factory, name, module in (
        (ECConnectorFactory, "ECShareConnector", "ecshare.connector"),
        (KVConnectorFactory, "KVShareConnector", "kvshare.connector"),
    ):
        try:
            factory.register_connector(name, module, name)
        except ValueError as exc:
            # vLLM has no public way to find out whether a name is registered.
            if "already registered" not in str(exc):
                raise
