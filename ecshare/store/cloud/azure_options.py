# SPDX-License-Identifier: Apache-2.0
"""Translates options of adlfs to those of obstore. Uses no network."""

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

from ecshare.store.accounts import (
    AzureAccount,
    account_in_url,
    azure_account,
    connection_fields,
)
from ecshare.store.cloud.options import (
    FSSPEC_MOOT,
    ODD_PREFIX,
    CloudPlan,
    Credentials,
    Options,
    bucket_and_prefix,
    checked_endpoint,
    is_plain,
)
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError
from ecshare.store.secrets import masked_url

_MOOT = FSSPEC_MOOT | {"assume_container_exists", "blocksize", "socket_timeout"}
_TRANSLATED = {
    "account_host", "account_key", "account_name", "anon", "client_id", "client_secret",
    "connection_string", "sas_token", "tenant_id",
}  # fmt: skip
_ADLFS_ONLY = {
    "connection_timeout", "credential", "location_mode", "read_timeout", "request_session",
    "timeout",
}  # fmt: skip
_CONTAINER = re.compile(r"\$root|\$web|[a-z0-9](?:-?[a-z0-9]){2,62}")


class AzurePlan(CloudPlan):
    """A container of Azure Blob Storage."""


def plan(config: StoreConfig, path: str) -> AzurePlan | str:
    """Translate `config`, or return why only fsspec can serve it.

    `path`: where the user wrote the options. Without credentials obstore searches by itself:
    environment, workload identity, managed identity.

    Raises:
        ConfigError: an option is unknown or of the wrong type, or no account is named.
    """
    options = Options(config.storage_options, path, _MOOT | _TRANSLATED | _ADLFS_ONLY)
    container, prefix = _container(config.url, f"{path}.url")
    if not is_plain(prefix):
        return ODD_PREFIX
    only = options.first_of(_ADLFS_ONLY)
    if only:
        return f"only adlfs knows the option {only}"
    for name in sorted(_TRANSLATED - {"anon"}):
        options.text(name)
    fields = connection_fields(config.url, config.storage_options)
    account = _account(config, options, fields)
    endpoint = checked_endpoint(account.endpoint, options.where("connection_string"))
    credentials = _credentials(options, fields)
    service = _service(options)
    anonymous = options.flag("anon") and credentials is None and not service
    return AzurePlan(
        bucket=container,
        prefix=prefix,
        credentials=credentials,
        client={"allow_http": endpoint.startswith("http://")},
        config={
            "account_name": account.name,
            "skip_signature": anonymous,
            # Or the environment could send us to an emulator, whatever the options say.
            "use_emulator": False,
            **({"endpoint": endpoint} if endpoint else {}),
        },
        secrets=service,
    )


def _container(url: str, option: str) -> tuple[str, str]:
    place, _, prefix = url.partition("://")[2].partition("/")
    container, at, _ = place.partition("@")
    if at and account_in_url(url) is None:
        raise ConfigError(
            f"{option}: {masked_url(url)!r} names no account; write az://container/prefix or "
            "abfs://container@account.dfs.core.windows.net/prefix"
        )
    refusal = f"{masked_url(url)!r} names no container; write az://container/prefix"
    return bucket_and_prefix(f"{container}/{prefix}", _CONTAINER, refusal, option)


def _account(config: StoreConfig, options: Options, fields: Mapping[str, str]) -> AzureAccount:
    account = azure_account(config.url, config.storage_options)
    if not account.name:
        raise ConfigError(
            f"{options.where('account_name')}: missing; give it, or a connection_string, or write "
            "abfs://container@account.dfs.core.windows.net/prefix"
        )
    given = {
        "account_name": options.text("account_name"),
        "connection_string": fields.get("accountname", ""),
    }
    for option, name in given.items():
        if name not in ("", account.name):
            raise ConfigError(
                f"{options.where(option)}: it names the account {name!r}, and {account.name!r} "
                "is named, too; which one is it?"
            )
    return account


def _credentials(options: Options, fields: Mapping[str, str]) -> Credentials | None:
    """Return the options' credentials as a provider: otherwise the environment's would win."""
    named = "connection_string" if "account_key" not in options else "account_key"
    key = options.text("account_key") or fields.get("accountkey", "")
    if key:
        try:
            base64.b64decode(key, validate=True)
        except binascii.Error:
            raise ConfigError(f"{options.where(named)}: its key is not base64") from None
        return lambda: {"access_key": key, "expires_at": None}
    token = (options.text("sas_token") or fields.get("sharedaccesssignature", "")).lstrip("?")
    if token:
        return lambda: {"sas_token": token, "expires_at": None}
    return None


def _service(options: Options) -> dict[str, Any]:
    """Return the options for the identity of a service, or for one of a machine's identities."""
    names = ("client_id", "client_secret", "tenant_id")
    given = {name: options.text(name) for name in names if options.text(name)}
    if "client_secret" in given:
        for name in names:
            if name not in given:
                raise ConfigError(
                    f"{options.where(name)}: missing; client_id, client_secret and tenant_id "
                    "come together"
                )
        given["credential_type"] = "client_secret"  # or a key of the environment would win
    return given
