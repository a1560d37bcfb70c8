# SPDX-License-Identifier: Apache-2.0
"""The module that vLLM's `ec_connector_module_path` names. See `ecshare.encoder.connector`."""

from ecshare.encoder.connector import ECShareConnector

__all__ = ["ECShareConnector"]
