# SPDX-License-Identifier: Apache-2.0
"""The names of the options of buckets, and the account, endpoint or emulator that the options and
the environment name.

Nothing is checked in this module: it ignores values of a wrong type, and `cloud.plan` refuses them.
"""

import os
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

GROUPS = ("client_kwargs", "config_kwargs", "config_kwargs.s3")
"""Options of s3fs that are objects of options."""
S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Variables of the environment; the first one counts."""
_HOST = re.compile(r"(?P<name>[a-z0-9]{3,24})\.(?:blob|dfs)\.(?P<suffix>[a-z0-9.-]+)")
_PUBLIC = "core.windows.net"


class CloudOptions(NamedTuple):
    """The options of one cloud. Names are separated by blanks."""

    name: Literal["s3", "azure", "gcs"]
    client: str
    """The package that serves it below fsspec."""
    prefix: str
    """A regular expression: obstore's names may begin with it."""
    texts: str
    flags: str
    """obstore's names, and a few of ours."""
    aliases: Mapping[str, str]
    """Other names, mostly those of `client`. A dot separates an option from the one around it."""

    def read_as(self, name: str) -> str | None:
        """Return the name in `texts` or `flags` for the option `name`; None if it has none."""
        bare = re.sub(f"^(?:{self.prefix})", "", name)
        if name in self.aliases or bare not in f"{self.texts} {self.flags}".split():
            return self.aliases.get(name)
        return self.aliases.get(bare, bare)

    def written(self, options: Mapping[str, Any]) -> dict[str, str]:
        """Return the texts in `options` by the names in `texts`."""
        texts = {n: text for n, text in flat(options).items() if isinstance(text, str)}
        return {own: text for n, text in texts.items() if (own := self.read_as(n))}


S3 = CloudOptions(
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
AZURE = CloudOptions(
    name="azure",
    client="adlfs",
    prefix="azure_storage_|azure_",
    texts="account_host account_key account_name authority_host client_id client_secret "
    "connection_string endpoint federated_token_file msi_resource_id object_id sas_key sas_token "
    "tenant_id token",
    flags="skip_signature use_azure_cli",
    aliases={"anon": "skip_signature", "sas_token": "sas_key"},
)
GCS = CloudOptions(
    name="gcs",
    client="gcsfs",
    prefix="google_",
    texts="application_credentials base_url bearer_token project service_account "
    "service_account_key token",
    flags="skip_signature",
    aliases={"endpoint_url": "base_url", "anon": "skip_signature"},
)
CLOUDS = {
    **dict.fromkeys(("s3", "s3a"), S3),
    **dict.fromkeys(("az", "abfs", "abfss"), AZURE),
    **dict.fromkeys(("gs", "gcs"), GCS),
}
"""By the protocol of a url."""


def flat(options: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return all options that are not None; options inside of others get names with dots."""
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


def azure_account(url: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the account of `url`, and the endpoint of its blobs; "": Azure's own endpoint.

    The url has precedence for the name, the options for the endpoint. The environment comes last.
    """
    written, fields = AZURE.written(options), connection_fields(url, options)
    name, host_endpoint = account_in_url(url) or ("", "")
    name = (
        name
        or written.get("account_name")
        or fields.get("accountname")
        or from_environment("AZURE_STORAGE_ACCOUNT_NAME")
    )
    own_host = written.get("account_host")
    protocol = fields.get("defaultendpointsprotocol", "https")
    suffix = fields.get("endpointsuffix", _PUBLIC)
    is_public = (protocol, suffix) == ("https", _PUBLIC)
    endpoint = (
        written.get("endpoint")
        or (own_host and f"https://{own_host}")
        or fields.get("blobendpoint")
        or host_endpoint
        or (not is_public and f"{protocol}://{name}.blob.{suffix}")
        or from_environment("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    )
    return name, endpoint.rstrip("/")


def account_in_url(url: str) -> tuple[str, str] | None:
    """Return account and endpoint of `abfs://container@account.dfs.core.windows.net/path`.

    None: the url names no account. See `azure_account`.
    """
    _, at, host = url.partition("://")[2].partition("/")[0].rpartition("@")
    found = _HOST.fullmatch(host) if at else None
    if found is None:
        return None
    name, suffix = found.groups()
    return name, "" if suffix == _PUBLIC else f"https://{name}.blob.{suffix}"


def connection_fields(url: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of the connection string, names in lower case.

    The string in the environment counts only if neither the url nor an option names an account.
    """
    written = AZURE.written(options)
    text = written.get("connection_string", "")
    if not text and not written.get("account_name") and account_in_url(url) is None:
        text = from_environment("AZURE_STORAGE_CONNECTION_STRING")
    fields = (field.partition("=") for field in text.split(";") if field.strip())
    return {name.strip().lower(): value.strip() for name, _, value in fields}


def s3_endpoint() -> str:
    """Return S3's endpoint from the environment; "" if none is set, or it is to be ignored."""
    is_ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
    return "" if is_ignored else from_environment(*S3_ENDPOINTS)


def gcs_endpoint(options: Mapping[str, Any]) -> str:
    """Return another endpoint for Google's API: the option, or the emulator in the environment.

    "": Google's own endpoint.
    """
    endpoint = GCS.written(options).get("base_url") or from_environment("STORAGE_EMULATOR_HOST")
    if not endpoint or endpoint == "default":
        return ""
    return endpoint if "://" in endpoint else f"http://{endpoint}"
