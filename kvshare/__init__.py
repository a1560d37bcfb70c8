# SPDX-License-Identifier: Apache-2.0
"""Share KV blocks between vLLM engines through object storage.

Importing the package does nothing. vLLM loads `kvshare.connector.KVShareConnector`.
"""
