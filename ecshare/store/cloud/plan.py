# SPDX-License-Identifier: Apache-2.0
"""Translates the options of a bucket to those of obstore.

Users write obstore's names, or those of fsspec's clients for the same options. If an option has no
counterpart in obstore, the url is opened by fsspec, and the log names the option.
"""

import contextlib
import difflib
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from ecshare.store import cloud_accounts
from ecshare.store.cloud.s3_account import Credentials, S3Account, searched, static
from ecshare.store.cloud_accounts import CLOUDS, CloudOptions, from_environment, s3_endpoint
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError
from ecshare.store.secrets import masked_url

_ACCOUNT_IN_URL = "abfs://container@account.dfs.core.windows.net/prefix"
_BUCKETS = {
    "s3": (re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}"), "s3://bucket/prefix"),
    "azure": (
        re.compile(r"\$root|\$web|[a-z0-9](?:-?[a-z0-9]){2,62}"),
        f"az://container/prefix or {_ACCOUNT_IN_URL}",
    ),
    "gcs": (re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"), "gs://bucket/prefix"),
}
# obstore percent-encodes other characters, fsspec does not: engines would use different keys.
_PLAIN_PREFIX = re.compile(r"[A-Za-z0-9!_.()=@+:,'/-]*")
_LIKELY_MISSPELT = 0.75
_MOST_CERTIFICATES = 4 << 20
# obstore's type of credentials for options of Azure. The first option that is given counts.
_AZURE_CREDENTIALS = {
    "account_key": "access_key",
    "sas_key": "sas_token",
    "token": "bearer_token",
    "client_secret": "client_secret",
    "federated_token_file": "workload_identity",
    "use_azure_cli": "azure_cli",
    "msi_resource_id": "managed_identity",
    "object_id": "managed_identity",
}


@dataclass(frozen=True)
class CloudPlan:
    """The arguments with which obstore opens a bucket."""

    cloud: Literal["s3", "azure", "gcs"]
    bucket: str
    """The bucket; Azure calls it a container."""
    prefix: str
    config: Mapping[str, Any] = field(repr=False)
    """The fields of obstore's S3Config, AzureConfig or GCSConfig; may hold secrets."""
    client: Mapping[str, Any] = field(repr=False)
    """The fields of obstore's ClientConfig."""
    credentials: Credentials | None = field(repr=False)
    """None: they are in `config`, or obstore searches for them itself."""


_Parts = tuple[str, dict[str, Any], Credentials | None]
"""The endpoint, "" for the cloud's own, and `config` and `credentials` of a plan."""


def plan(config: StoreConfig, path: str) -> CloudPlan | str:
    """Translate `config`, whose protocol is in CLOUDS, or return why only fsspec can serve it.

    `path`: where the user wrote the options. Uses the network only for AWS's search for
    credentials. For Azure and Google obstore itself searches: environment, files, the machine.

    Raises:
        ConfigError: the url or an option cannot work, or there are no credentials.
    """
    cloud = CLOUDS[config.url.partition("://")[0]]
    options = _Options(config, path, cloud)
    bucket, prefix = _bucket_and_prefix(config.url, cloud, f"{path}.url")
    if options.client_only:
        return f"obstore has no option {options.client_only}"
    if not _PLAIN_PREFIX.fullmatch(prefix):
        return "the prefix has characters that obstore would encode"
    parts = {"s3": _s3, "azure": _azure, "gcs": _gcs}[cloud.name](options, bucket)
    if isinstance(parts, str):
        return parts
    endpoint, settings, credentials = parts
    client = {"allow_http": endpoint.startswith("http://")}
    if cloud.name == "s3":
        client |= _certificates(options)
    return CloudPlan(cloud.name, bucket, prefix, settings, client, credentials)


class _Options:
    """Holds `storage_options` by obstore's names. Errors name an option as the user wrote it."""

    def __init__(self, config: StoreConfig, path: str, cloud: CloudOptions) -> None:
        """Read the options of `config`, which the user wrote at `path`.

        Raises:
            ConfigError: an option is misspelt, empty, of another type, or contradicts another.
        """
        self.url, self.raw, self.path = config.url, config.storage_options, path
        self.found: dict[str, Any] = {}
        self._written: dict[str, str] = {}
        self.client_only = ""
        """The first option that obstore does not have; "": none."""
        for name, value in cloud_accounts.flat(self.raw).items():
            self._take(cloud, name, value)

    def _take(self, cloud: CloudOptions, name: str, value: Any) -> None:
        where, own = f"{self.path}.storage_options.{name}", cloud.read_as(name)
        if own is None:
            if name in cloud_accounts.GROUPS:
                raise ConfigError(f"{where}: expected an object, got {type(value).__name__}")
            known = [*cloud.texts.split(), *cloud.flags.split(), *cloud.aliases]
            near = difflib.get_close_matches(name.lower(), known, 1, _LIKELY_MISSPELT)
            if near:
                raise ConfigError(f"{where}: unknown option; did you mean {near[0]!r}?")
            self.client_only = self.client_only or name
            return
        kinds = {str: "a string", bool: "true or false", str | bool: "a path, or true or false"}
        kind = bool if own in cloud.flags.split() else str | bool if own == "verify" else str
        if not isinstance(value, kind):
            raise ConfigError(f"{where}: expected {kinds[kind]}, got {type(value).__name__}")
        if value == "":
            raise ConfigError(f"{where}: is empty; leave it out, or fill it in")
        if self.found.setdefault(own, value) != value:
            raise ConfigError(f"{where}: contradicts {self._written[own]}; leave one out")
        self._written.setdefault(own, name)

    def where(self, *names: str) -> str:
        """Return the user's path of the first of `names` that was given; else of the last."""
        given = (self._written[name] for name in names if name in self._written)
        return f"{self.path}.storage_options.{next(given, names[-1])}"

    def those(self, names: str) -> dict[str, Any]:
        """Return the given ones among the options `names`, which are separated by blanks."""
        return {name: self.found[name] for name in names.split() if name in self.found}


def _bucket_and_prefix(url: str, cloud: CloudOptions, option: str) -> tuple[str, str]:
    bucket, _, prefix = url.partition("://")[2].partition("/")
    prefix = prefix.strip("/")
    if cloud.name == "azure" and cloud_accounts.account_in_url(url):
        bucket = bucket.partition("@")[0]
    pattern, example = _BUCKETS[cloud.name]
    if not pattern.fullmatch(bucket):
        raise ConfigError(
            f"{option}: {masked_url(url)!r} names no bucket or container; write {example}"
        )
    if prefix and any(level in ("", ".", "..") for level in prefix.split("/")):
        raise ConfigError(f"{option}: the prefix {prefix!r} has an empty or dotted level")
    return bucket, prefix


def _s3(options: _Options, bucket: str) -> _Parts:
    credentials, region, endpoint = _s3_account(options)
    option = options.where("endpoint", "endpoint_url")
    url = _checked(options.found.get("endpoint", endpoint), option)
    region = region or from_environment("AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1"
    region = options.found.get("region", region)
    style = options.found.get("addressing_style", "auto")
    if style not in ("auto", "path", "virtual"):
        raise ConfigError(f"{options.where('addressing_style')}: write auto, path or virtual")
    # A bucket name with dots does not match the certificate of *.s3.amazonaws.com.
    virtual = style == "virtual" or (style == "auto" and not url and "." not in bucket)
    own = options.found.get("virtual_hosted_style_request")
    virtual = virtual if own is None else own
    # Without an endpoint in its arguments, obstore takes the environment's, even if we ignore that.
    asked = url or (
        from_environment(*cloud_accounts.S3_ENDPOINTS) and f"https://s3.{region}.amazonaws.com"
    )
    if virtual and not (own and f"://{bucket}." in asked):  # as users of obstore write it
        asked = asked.replace("://", f"://{bucket}.", 1)
    settings = {
        "region": region,
        "skip_signature": options.found.get("skip_signature", False),
        "unsigned_payload": options.found.get("unsigned_payload", _is_safe(url)),
        "virtual_hosted_style_request": virtual,
        # Not by another name: the environment's AWS_ENDPOINT_URL_S3 would override it.
        **({"aws_endpoint_url_s3": asked} if asked else {}),
        **options.those(
            "request_payer server_side_encryption sse_bucket_key_enabled sse_customer_key_base64 "
            "sse_kms_key_id"
        ),
    }
    return url, settings, credentials


def _s3_account(options: _Options) -> S3Account:
    """Return no credentials, the keys in the options, or the result of AWS's search."""
    if options.found.get("skip_signature"):
        return None, "", s3_endpoint()
    key, secret = options.found.get("access_key_id"), options.found.get("secret_access_key")
    if not key and not secret:
        return searched(options.found.get("profile"), options.path)
    if not key or not secret:
        missing = options.where("secret" if key else "key")
        raise ConfigError(f"{missing}: missing; key and secret come together")
    token = options.found.get("session_token")
    keys = static(access_key_id=key, secret_access_key=secret, token=token)
    return keys, "", s3_endpoint()


def _is_safe(url: str) -> bool:
    """Return whether no third party can change a body in transit: TLS, or a server on this host."""
    host = urlsplit(url).hostname or ""
    try:
        return not url.startswith("http://") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _certificates(options: _Options) -> dict[str, Any]:
    verify, option = options.found.get("verify"), options.where("verify")
    if verify is None:
        verify, option = from_environment("AWS_CA_BUNDLE") or True, "AWS_CA_BUNDLE"
    if isinstance(verify, bool):
        return {} if verify else {"allow_invalid_certificates": True}
    content = b""
    with contextlib.suppress(OSError, ValueError):
        if Path(verify).is_file():  # opening a pipe would block until there is a writer
            with Path(verify).open("rb") as file:
                content = file.read(_MOST_CERTIFICATES + 1)
    if len(content) > _MOST_CERTIFICATES or b"-----BEGIN CERTIFICATE-----" not in content:
        raise ConfigError(
            f"{option}: no certificates can be read from {verify!r}; name a file in PEM, with at "
            f"most {_MOST_CERTIFICATES:,} bytes"
        )
    return {"root_certificate": content}


def _azure(options: _Options, _: str) -> _Parts:
    fields = cloud_accounts.connection_fields(options.url, options.raw)
    account, endpoint = cloud_accounts.azure_account(options.url, options.raw)
    where = options.where("account_name")
    if not account:
        raise ConfigError(
            f"{where}: missing; give it, or a connection_string, or write {_ACCOUNT_IN_URL}"
        )
    if names := {options.found.get("account_name"), fields.get("accountname")} - {
        account,
        None,
        "",
    }:
        raise ConfigError(f"{where}: {names.pop()!r} and {account!r} are both named; keep one")
    given = options.those(
        "account_key authority_host client_id client_secret federated_token_file msi_resource_id "
        "object_id sas_key tenant_id token use_azure_cli"
    )
    if not _AZURE_CREDENTIALS.keys() & given:
        in_text = {"account_key": "accountkey", "sas_key": "sharedaccesssignature"}
        given |= {name: fields[key] for name, key in in_text.items() if fields.get(key)}
    if "sas_key" in given:
        given["sas_key"] = given["sas_key"].removeprefix("?")
    kind = next((kind for name, kind in _AZURE_CREDENTIALS.items() if given.get(name)), None)
    endpoint = _checked(endpoint, options.where("endpoint", "account_host", "connection_string"))
    settings = {
        "account_name": account,
        "skip_signature": options.found.get("skip_signature", False) and kind is None,
        # Otherwise the environment could select an emulator against the options.
        "use_emulator": False,
        **({"endpoint": endpoint} if endpoint else {}),
        **({"credential_type": kind} if kind else {}),  # or the environment's could override it
        **given,
    }
    return endpoint, settings, None


def _gcs(options: _Options, _: str) -> _Parts | str:
    option = options.where("base_url", "endpoint_url")
    endpoint = _checked(cloud_accounts.gcs_endpoint(options.raw), option)
    given = options.those(
        "application_credentials bearer_token service_account service_account_key skip_signature"
    )
    token = options.found.get("token", "google_default")
    if token in ("browser", "cache", "cloud"):
        return f"only gcsfs knows the token {token!r}"
    if token != "google_default":
        if given:
            raise ConfigError(f"{options.where('token')}: contradicts {min(given)}; leave one out")
        given = _by_token(token)
    anonymous, bearer = given.get("skip_signature", False), given.pop("bearer_token", "")
    settings = {
        "skip_signature": anonymous,
        **({"base_url": endpoint} if endpoint else {}),
        **given,
    }
    # Anonymous access has a provider too: otherwise obstore asks the metadata server for
    # credentials before each write.
    return endpoint, settings, static(token=bearer) if bearer or anonymous else None


def _by_token(token: str) -> dict[str, Any]:
    """Return obstore's option for a `token` of gcsfs."""
    if token == "anon":
        return {"skip_signature": True}
    # A misspelt path must not be sent to the server as a bearer token.
    if token.startswith("/") or token.endswith(".json") or os.path.exists(token):  # noqa: PTH110
        return {"service_account": token}
    # env:NAME and file:/path are replaced by the content of such a file.
    return {"service_account_key" if token.lstrip().startswith("{") else "bearer_token": token}


def _checked(endpoint: str, option: str) -> str:
    """Return `endpoint`, an http or https url that `option` names, without a slash at its end."""
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an invalid address or port
        is_url = False
    if endpoint and not is_url:
        shown = masked_url(endpoint)
        raise ConfigError(
            f"{option}: {shown!r} is no endpoint; write https://host or http://host:port"
        )
    return endpoint.rstrip("/")
