# SPDX-License-Identifier: Apache-2.0
"""Which account of Azure, which endpoint of S3, or which emulator a url means: its options and the
environment say it.

Believes nothing: what is of a wrong type counts as not there. `azureoptions` refuses it.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

AZURE = ("az", "abfs", "abfss")
GCS = ("gs", "gcs")

_HOST = re.compile(r"(?P<name>[a-z0-9]{3,24})\.(?:blob|dfs)\.(?P<suffix>[a-z0-9.-]+)")
_PUBLIC = "core.windows.net"


class AzureAccount(Struct, frozen=True):
    """An account, and where its blobs are served."""

    name: str
    """"": nobody says which."""
    endpoint: str
    """"": Azure's own, `https://<name>.blob.core.windows.net`."""


def azure_account(url: str, options: Mapping[str, Any]) -> AzureAccount:
    """The account of `url`: written there, in the options, or in the environment; in this order."""
    host = account_in_url(url)
    fields = connection_fields(url, options)
    name = (
        (host.name if host else "")
        or _text(options, "account_name")
        or fields.get("accountname", "")
        or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    )
    own_host = _text(options, "account_host")
    endpoint = (
        (f"https://{own_host}" if own_host else "")
        or fields.get("blobendpoint", "")
        or (host.endpoint if host else "")
        or _of_parts(name, fields)
        or os.environ.get("AZURE_STORAGE_ENDPOINT", "")
        or os.environ.get("AZURE_ENDPOINT", "")
    )
    return AzureAccount(name, endpoint.rstrip("/"))


def account_in_url(url: str) -> AzureAccount | None:
    """The account in `abfs://container@account.dfs.core.windows.net/path`; None: none is there."""
    _, at, host = url.partition("://")[2].partition("/")[0].rpartition("@")
    found = _HOST.fullmatch(host) if at else None
    if found is None:
        return None
    public = found["suffix"] == _PUBLIC
    endpoint = "" if public else f"https://{found['name']}.blob.{found['suffix']}"
    return AzureAccount(found["name"], endpoint)


def connection_fields(url: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The fields of the connection string, names in lower case.

    The environment's counts only where neither the url nor an option names an account.
    """
    text = _text(options, "connection_string")
    if not text and not _text(options, "account_name") and account_in_url(url) is None:
        text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    fields = (field.partition("=") for field in text.split(";") if field.strip())
    return {name.strip().lower(): value.strip() for name, _, value in fields}


def ignores_s3_endpoints() -> bool:
    """Whether no endpoint counts but the one in the options: AWS's tools heed this, too."""
    return os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"


def s3_endpoint() -> str:
    """Where the environment says that S3 is served; "": it says nothing, or is not to be heeded."""
    names = () if ignores_s3_endpoints() else ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def gcs_endpoint(options: Mapping[str, Any]) -> str:
    """Where Google's API is served instead, or "": an option, or an emulator in the environment."""
    endpoint = _text(options, "endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST", "")
    if not endpoint or endpoint == "default":
        return ""
    return endpoint if "://" in endpoint else f"http://{endpoint}"


def _of_parts(name: str, fields: Mapping[str, str]) -> str:
    """The endpoint that a connection string names by its parts."""
    protocol = fields.get("defaultendpointsprotocol", "https")
    suffix = fields.get("endpointsuffix", _PUBLIC)
    return "" if (protocol, suffix) == ("https", _PUBLIC) else f"{protocol}://{name}.blob.{suffix}"


def _text(options: Mapping[str, Any], name: str) -> str:
    value = options.get(name)
    return value if isinstance(value, str) else ""
