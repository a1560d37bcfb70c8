# SPDX-License-Identifier: Apache-2.0
"""What the options of a bucket are called, and which account, endpoint or emulator they and the
environment name.

Checks nothing: values of a wrong type are ignored here, and refused by `cloud.options`.
"""

import os
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

GROUPS = ("client_kwargs", "config_kwargs", "config_kwargs.s3")  # of s3fs: objects of options
_HOST = re.compile(r"(?P<name>[a-z0-9]{3,24})\.(?:blob|dfs)\.(?P<suffix>[a-z0-9.-]+)")
_PUBLIC = "core.windows.net"


class Cloud(NamedTuple):
    """The options of one cloud."""

    name: Literal["s3", "azure", "gcs"]
    client: str
    """The package that serves it below fsspec."""
    prefix: str
    """An expression: obstore's names may begin with it."""
    texts: str
    flags: str
    """obstore's names, and a few of ours, separated by blanks."""
    aliases: Mapping[str, str]
    """Names of `client` for the same; a dot stands before what is inside of another option."""

    def read_as(self, name: str) -> str | None:
        """Return the name in `texts` or `flags` for the option `name`; None: there is none."""
        bare = re.sub(f"^(?:{self.prefix})", "", name)
        if name in self.aliases or bare not in f"{self.texts} {self.flags}".split():
            return self.aliases.get(name)
        return self.aliases.get(bare, bare)

    def text(self, options: Mapping[str, Any], wanted: str) -> str:
        """Return the text that `options` have under any name for `wanted`, "" if there is none."""
        found = (value for name, value in flat(options).items() if self.read_as(name) == wanted)
        return next((value for value in found if isinstance(value, str)), "")


S3 = Cloud(
    name="s3",
    client="s3fs",
    prefix="aws_",
    texts="access_key_id secret_access_key session_token profile endpoint endpoint_url region "
    "addressing_style verify server_side_encryption sse_kms_key_id sse_customer_key_base64",
    flags="skip_signature unsigned_payload virtual_hosted_style_request request_payer "
    "sse_bucket_key_enabled",
    aliases={
        "key": "access_key_id",
        "secret": "secret_access_key",
        "token": "session_token",
        "anon": "skip_signature",
        "requester_pays": "request_payer",
        "endpoint_url": "endpoint",
        "client_kwargs.endpoint_url": "endpoint",
        "client_kwargs.region_name": "region",
        "region_name": "region",
        "client_kwargs.verify": "verify",
        "config_kwargs.s3.addressing_style": "addressing_style",
    },
)
AZURE = Cloud(
    name="azure",
    client="adlfs",
    prefix="azure_storage_|azure_",
    texts="account_host account_key account_name authority_host client_id client_secret "
    "connection_string endpoint federated_token_file msi_resource_id object_id sas_key sas_token "
    "tenant_id token",
    flags="skip_signature use_azure_cli",
    aliases={"anon": "skip_signature", "sas_token": "sas_key"},
)
GCS = Cloud(
    name="gcs",
    client="gcsfs",
    prefix="google_",
    texts="application_credentials base_url bearer_token project service_account "
    "service_account_key token",
    flags="skip_signature",
    aliases={"endpoint_url": "base_url"},
)
CLOUDS = {
    **dict.fromkeys(("s3", "s3a"), S3),
    **dict.fromkeys(("az", "abfs", "abfss"), AZURE),
    **dict.fromkeys(("gs", "gcs"), GCS),
}
"""By the protocol of a url."""


class AzureAccount(NamedTuple):
    """An account, and where its blobs are served."""

    name: str
    """"": nobody says which."""
    endpoint: str
    """"": Azure's own, `https://<name>.blob.core.windows.net`."""


def flat(options: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return all options that are not None; those inside of another option have names with dots."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        dotted = f"{above}{name}"
        if dotted in GROUPS and isinstance(value, Mapping):
            found |= flat(value, f"{dotted}.")
        elif value is not None:
            found[dotted] = value
    return found


def from_environment(*names: str) -> str:
    """Return the first of these environment variables that is not empty, "" if all are."""
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def azure_account(url: str, options: Mapping[str, Any]) -> AzureAccount:
    """The account of `url`: written there, in the options, or in the environment; in this order."""
    host = account_in_url(url)
    fields = connection_fields(url, options)
    name = (
        (host.name if host else "")
        or AZURE.text(options, "account_name")
        or fields.get("accountname", "")
        or from_environment("AZURE_STORAGE_ACCOUNT_NAME")
    )
    own_host = AZURE.text(options, "account_host")
    endpoint = (
        AZURE.text(options, "endpoint")
        or (f"https://{own_host}" if own_host else "")
        or fields.get("blobendpoint", "")
        or (host.endpoint if host else "")
        or _of_parts(name, fields)
        or from_environment("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
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
    text = AZURE.text(options, "connection_string")
    if not text and not AZURE.text(options, "account_name") and account_in_url(url) is None:
        text = from_environment("AZURE_STORAGE_CONNECTION_STRING")
    fields = (field.partition("=") for field in text.split(";") if field.strip())
    return {name.strip().lower(): value.strip() for name, _, value in fields}


def ignores_s3_endpoints() -> bool:
    """Whether no endpoint counts but the one in the options: AWS's tools heed this, too."""
    return os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"


def s3_endpoint() -> str:
    """Where the environment says that S3 is served; "": it says nothing, or is not to be heeded."""
    if ignores_s3_endpoints():
        return ""
    return from_environment("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def gcs_endpoint(options: Mapping[str, Any]) -> str:
    """Where Google's API is served instead, or "": an option, or an emulator in the environment."""
    endpoint = GCS.text(options, "base_url") or from_environment("STORAGE_EMULATOR_HOST")
    if not endpoint or endpoint == "default":
        return ""
    return endpoint if "://" in endpoint else f"http://{endpoint}"


def _of_parts(name: str, fields: Mapping[str, str]) -> str:
    """The endpoint that a connection string names by its parts."""
    protocol = fields.get("defaultendpointsprotocol", "https")
    suffix = fields.get("endpointsuffix", _PUBLIC)
    return "" if (protocol, suffix) == ("https", _PUBLIC) else f"{protocol}://{name}.blob.{suffix}"
