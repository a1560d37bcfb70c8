# SPDX-License-Identifier: Apache-2.0
"""Translates options of s3fs to those of obstore. Uses the network only for instance credentials.

Options keep the names that they have in s3fs. If an option has no counterpart in obstore, the url
is opened by fsspec, and the log names the option.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ecshare.store.accounts import ignores_s3_endpoints, s3_endpoint
from ecshare.store.cloud.options import (
    FSSPEC_MOOT,
    ODD_PREFIX,
    CloudPlan,
    Credentials,
    Options,
    bucket_and_prefix,
    checked_endpoint,
    from_environment,
    is_plain,
)
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError
from ecshare.store.secrets import masked_url

_MOOT = FSSPEC_MOOT | {"cache_regions", "fixed_upload_size", "use_ssl"}
_TRANSLATED = {
    "anon", "client_kwargs", "config_kwargs", "endpoint_url", "key", "password", "profile",
    "requester_pays", "secret", "token", "username",
}  # fmt: skip
_S3FS_ONLY = {"event_hooks", "s3_additional_kwargs", "session", "session_vars"}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_CREDENTIALS_TTL = timedelta(minutes=10)  # botocore renews its own; this is how often we ask it


class S3Plan(CloudPlan):
    """A bucket of S3."""


def plan(config: StoreConfig, path: str) -> S3Plan | str:
    """Translate `config`, or return why only fsspec can serve it.

    `path`: where the user wrote the options.

    Raises:
        ConfigError: an option is unknown or of the wrong type, or there are no credentials.
    """
    options = _Options(config.storage_options, path, _MOOT | _TRANSLATED | _S3FS_ONLY)
    bucket, prefix = bucket_and_prefix(
        config.url.partition("://")[2],
        _BUCKET,
        f"{masked_url(config.url)!r} names no bucket; write s3://bucket/prefix",
        f"{path}.url",
    )
    if not is_plain(prefix):
        return ODD_PREFIX
    only = options.untranslatable()
    if only:
        return f"only s3fs knows the option {only}"
    endpoint = options.text("endpoint_url") or options.text("client_kwargs", "endpoint_url")
    region = options.text("client_kwargs", "region_name")
    credentials: Credentials | None = None
    anonymous, ignores = options.flag("anon"), ignores_s3_endpoints()
    if not anonymous:
        account = options.account() or _search(options.text("profile"), path)
        credentials = account.credentials
        endpoint = endpoint or account.endpoint
        region = region or account.region
        ignores = ignores or account.ignores_endpoints
    if not ignores:
        endpoint = endpoint or s3_endpoint() or from_environment("AWS_ENDPOINT")
    region = region or from_environment("AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1"
    url = checked_endpoint(endpoint, options.where("endpoint_url"))
    style = options.text("config_kwargs", "s3", "addressing_style") or "auto"
    # A bucket name with dots does not match the certificate of *.s3.amazonaws.com.
    virtual = style == "virtual" or (style == "auto" and not url and "." not in bucket)
    # What is not given, obstore itself looks up in the environment.
    asked = url or (f"https://s3.{region}.amazonaws.com" if ignores else "")
    signed = options.flag("config_kwargs", "s3", "payload_signing_enabled", default=not _safe(url))
    return S3Plan(
        bucket=bucket,
        prefix=prefix,
        credentials=credentials,
        client={"allow_http": url.startswith("http://"), **_certificates(options)},
        config={
            "region": region,
            "skip_signature": anonymous,
            "unsigned_payload": not signed,
            "virtual_hosted_style_request": virtual,
            **({"request_payer": True} if options.flag("requester_pays") else {}),
            # Under this name, or the environment's AWS_ENDPOINT_URL_S3 would win over the option.
            **({"aws_endpoint_url_s3": _with_bucket(asked, bucket, virtual)} if asked else {}),
        },
    )


@dataclass(frozen=True)
class _Account:
    """The result of a search for credentials."""

    credentials: Credentials | None = field(repr=False)
    region: str = ""
    endpoint: str = ""
    ignores_endpoints: bool = False
    """Whether the environment's endpoints do not count."""


class _Options(Options):
    """The options of S3."""

    def untranslatable(self) -> str | None:
        """Return the first option without a counterpart in obstore; None if there is none."""
        name = self.first_of(_S3FS_ONLY)
        if name:
            return name
        inner = {
            ("client_kwargs",): {"endpoint_url", "region_name", "verify"},
            ("config_kwargs",): {"s3", "signature_version"},
            ("config_kwargs", "s3"): {"addressing_style", "payload_signing_enabled"},
        }
        for names, translated in inner.items():
            for name in self.get(dict, *names) or {}:
                if name not in translated:
                    return ".".join((*names, name))
        if self.text("config_kwargs", "signature_version") not in ("", "s3v4"):
            return "config_kwargs.signature_version"
        return None

    def account(self) -> _Account | None:
        """Return the keys that the options contain; None if they contain none.

        Raises:
            ConfigError: half of a pair is missing.
        """
        name = "key" if "key" in self else "username"
        key, secret = self.text(name), self.text("secret") or self.text("password")
        if not key and not secret:
            return None
        if not key or not secret:
            missing = "secret" if key else "key"
            raise ConfigError(f"{self.where(missing)}: missing; key and secret come together")
        return _Account(credentials=_static(key, secret, self.text("token") or None))


def _static(key: str, secret: str, token: str | None) -> Credentials:
    """Return a provider. With plain options obstore would add the host's AWS_SESSION_TOKEN."""
    return lambda: {
        "access_key_id": key,
        "secret_access_key": secret,
        "token": token,
        "expires_at": None,
    }


def _search(profile: str, path: str) -> _Account:
    """Search the usual chain: environment, profile files, single sign-on, roles, the instance.

    botocore does it, because obstore supports neither profiles nor single sign-on.
    """
    try:
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
    except ImportError:
        if profile:
            raise ConfigError(
                f"{path}.storage_options.profile: needs botocore: "
                "pip install botocore (ecshare's extra [s3])"
            ) from None
        return _Account(credentials=None)
    try:
        session = Session(profile=profile or None)
        found = session.get_credentials()
        ignores = bool(session.get_config_variable("ignore_configured_endpoint_urls"))
        # The environment comes before the profile's file.
        endpoint = "" if ignores else s3_endpoint() or _of_profile(session, path)
    except BotoCoreError as exc:
        raise ConfigError(f"{path}.storage_options: no S3 credentials: {exc}") from exc
    if found is None:
        raise ConfigError(
            f"{path}.storage_options: no S3 credentials; set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or give key and secret here, or a profile, or anon"
        )

    def provide() -> dict[str, Any]:
        now = found.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_TTL,
        }

    return _Account(
        credentials=provide,
        region=str(session.get_config_variable("region") or ""),
        endpoint=endpoint,
        ignores_endpoints=ignores,
    )


def _of_profile(session: Any, path: str) -> str:
    """Return the endpoint that the profile in AWS's configuration gives for S3, or for everything.

    Raises:
        ConfigError: the profile names a section that does not exist.
    """
    profile = session.get_scoped_config()
    name = profile.get("services")
    sections = session.full_config.get("services", {})
    if name is not None and name not in sections:
        raise ConfigError(
            f"{path}.storage_options: the profile in AWS's configuration has services = {name}, "
            f"and there is no section [services {name}]"
        )
    of_s3 = sections.get(name, {}).get("s3", {})
    in_section = of_s3.get("endpoint_url") if isinstance(of_s3, Mapping) else None
    return str(in_section or profile.get("endpoint_url") or "")


def _with_bucket(url: str, bucket: str, virtual: bool) -> str:
    scheme, _, host = url.partition("://")
    return f"{scheme}://{bucket}.{host}" if virtual else url


def _safe(url: str) -> bool:
    """Whether nobody on the way to the server can change a body: TLS, or a server on this host."""
    if not url.startswith("http://"):
        return True
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _certificates(options: _Options) -> dict[str, Any]:
    verify = options.get(object, "client_kwargs", "verify")
    option = options.where("client_kwargs", "verify")
    if verify is None:
        verify, option = from_environment("AWS_CA_BUNDLE") or True, "AWS_CA_BUNDLE"
    if isinstance(verify, bool):
        return {} if verify else {"allow_invalid_certificates": True}
    try:
        certificates = Path(verify).read_bytes()
    except (OSError, TypeError, ValueError) as exc:
        raise ConfigError(f"{option}: no certificates can be read from {verify!r}: {exc}") from exc
    if b"-----BEGIN CERTIFICATE-----" not in certificates:
        raise ConfigError(f"{option}: {verify!r} holds no certificate in PEM")
    return {"root_certificate": certificates}
