# SPDX-License-Identifier: Apache-2.0
"""What s3fs users write, as obstore reads it. Touches no network but for instance credentials.

Options keep the names they have in s3fs. What has no counterpart in obstore is not guessed at: the
url then takes the fsspec road, and the log says for which option.
"""

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ecshare.store.config import StoreConfig, masked_url, suggestion
from ecshare.store.errors import ConfigError

Credentials = Callable[[], dict[str, Any]]

# Options about caches, block sizes and event loops of fsspec: nothing here to apply them to.
_MOOT = {
    "asynchronous", "batch_size", "cache_regions", "default_block_size", "default_cache_type",
    "default_fill_cache", "fixed_upload_size", "listings_expiry_time", "loop", "max_concurrency",
    "max_paths", "skip_instance_cache", "use_listings_cache", "use_ssl", "version_aware",
}  # fmt: skip
_TRANSLATED = {
    "anon", "client_kwargs", "config_kwargs", "endpoint_url", "key", "password", "profile",
    "requester_pays", "secret", "token", "username",
}  # fmt: skip
_S3FS_ONLY = {"event_hooks", "s3_additional_kwargs", "session", "session_vars"}
# obstore percent-encodes other characters, s3fs does not: two engines would not meet.
_PLAIN_PREFIX = re.compile(r"[A-Za-z0-9!_.()=@+:,'/-]*")
_CREDENTIALS_TTL = timedelta(minutes=10)  # botocore renews its own; this is how often we ask it


@dataclass(frozen=True)
class S3Plan:
    """All that obstore needs to open a bucket."""

    bucket: str
    prefix: str
    config: Mapping[str, Any]
    """Of obstore's S3Config; no secrets."""
    client: Mapping[str, Any]
    """Of obstore's ClientConfig."""
    credentials: Credentials | None = field(repr=False)
    """None: anonymous, or obstore's own search."""


def plan(config: StoreConfig, path: str) -> S3Plan | str:
    """Translate `config`, or return why only fsspec can serve it.

    `path` is the user's, for ConfigError: an option is unknown, of the wrong type, or there are no
    credentials.
    """
    options = _Options({k: v for k, v in config.storage_options.items() if v is not None}, path)
    bucket, prefix = _bucket(config.url, f"{path}.url")
    if not _PLAIN_PREFIX.fullmatch(prefix):
        return "the prefix has characters that obstore would encode"
    only = options.untranslatable()
    if only:
        return f"only s3fs knows the option {only}"
    endpoint = options.text("endpoint_url") or options.text("client_kwargs", "endpoint_url")
    region = options.text("client_kwargs", "region_name")
    credentials: Credentials | None = None
    anonymous = options.flag("anon")
    if not anonymous:
        account = options.account() or _search(options.text("profile"), path)
        credentials = account.credentials
        endpoint = endpoint or account.endpoint
        region = region or account.region
    endpoint = endpoint or _env("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    region = region or _env("AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1"
    url = _endpoint(endpoint, options.where("endpoint_url"))
    style = options.text("config_kwargs", "s3", "addressing_style") or "auto"
    # A bucket name with dots does not match the certificate of *.s3.amazonaws.com.
    virtual = style == "virtual" or (style == "auto" and not url and "." not in bucket)
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
            **({"aws_endpoint_url_s3": _with_bucket(url, bucket, virtual)} if url else {}),
        },
    )


@dataclass(frozen=True)
class _Account:
    """What a search for credentials found."""

    credentials: Credentials | None = field(repr=False)
    region: str = ""
    endpoint: str = ""


class _Options:
    """`storage_options`, read by name and type; every refusal names the user's path."""

    def __init__(self, raw: Mapping[str, Any], path: str) -> None:
        self._raw = raw
        self._path = f"{path}.storage_options"
        known = sorted(_MOOT | _TRANSLATED | _S3FS_ONLY)
        for name in raw:
            if name not in known:
                raise ConfigError(f"{self.where(name)}: unknown option; {suggestion(name, known)}")

    def where(self, *names: str) -> str:
        return ".".join((self._path, *names))

    def untranslatable(self) -> str | None:
        """The first option that obstore has no word for."""
        for name in sorted(_S3FS_ONLY & set(self._raw)):
            return name
        inner = {
            ("client_kwargs",): {"endpoint_url", "region_name", "verify"},
            ("config_kwargs",): {"s3", "signature_version"},
            ("config_kwargs", "s3"): {"addressing_style", "payload_signing_enabled"},
        }
        for names, translated in inner.items():
            for name in self._get(dict, *names) or {}:
                if name not in translated:
                    return ".".join((*names, name))
        if self.text("config_kwargs", "signature_version") not in ("", "s3v4"):
            return "config_kwargs.signature_version"
        return None

    def text(self, *names: str) -> str:
        """The string there, or "" where there is none."""
        value = self._get(str, *names)
        if value == "":
            raise ConfigError(f"{self.where(*names)}: is empty; leave it out, or fill it in")
        return value or ""

    def flag(self, *names: str, default: bool = False) -> bool:
        value = self._get(bool, *names)
        return default if value is None else bool(value)

    def any(self, *names: str) -> Any:
        return self._get(object, *names)

    def account(self) -> _Account | None:
        """The keys written into the options, if they are."""
        name = "key" if "key" in self._raw else "username"
        key, secret = self.text(name), self.text("secret") or self.text("password")
        if not key and not secret:
            return None
        if not key or not secret:
            missing = "secret" if key else "key"
            raise ConfigError(f"{self.where(missing)}: missing; key and secret come together")
        return _Account(credentials=_static(key, secret, self.text("token") or None))

    def _get(self, kind: type, *names: str) -> Any:
        value: Any = self._raw
        for depth, name in enumerate(names):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{self.where(*names[:depth])}: expected an object of options")
            value = value.get(name)
            if value is None:
                return None
        if not isinstance(value, kind):
            wanted = {str: "a string", bool: "true or false", dict: "an object"}[kind]
            raise ConfigError(
                f"{self.where(*names)}: expected {wanted}, got {type(value).__name__}"
            )
        return value


def _bucket(url: str, option: str) -> tuple[str, str]:
    bucket, _, prefix = url.partition("://")[2].partition("/")
    prefix = prefix.strip("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}", bucket):
        raise ConfigError(
            f"{option}: {masked_url(url)!r} names no bucket; write s3://bucket/prefix"
        )
    if prefix and any(level in ("", ".", "..") for level in prefix.split("/")):
        raise ConfigError(f"{option}: the prefix {prefix!r} has an empty or dotted level")
    return bucket, prefix


def _static(key: str, secret: str, token: str | None) -> Credentials:
    """A provider, not plain options: beside those obstore takes AWS_SESSION_TOKEN of the host."""
    return lambda: {
        "access_key_id": key,
        "secret_access_key": secret,
        "token": token,
        "expires_at": None,
    }


def _search(profile: str, path: str) -> _Account:
    """The usual chain: environment, profile files, single sign-on, roles, the instance's own.

    By botocore: obstore knows neither profiles nor single sign-on.
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
        profile_options = session.get_scoped_config()
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
        # The environment comes before the profile's file.
        endpoint=_env("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        or str(profile_options.get("endpoint_url") or ""),
    )


def _env(*names: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _endpoint(url: str, option: str) -> str:
    if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        raise ConfigError(
            f"{option}: {masked_url(url)!r} is no endpoint; write https://host or http://host:port"
        )
    return url.rstrip("/")


def _with_bucket(url: str, bucket: str, virtual: bool) -> str:
    scheme, _, host = url.partition("://")
    return f"{scheme}://{bucket}.{host}" if virtual else url


def _safe(url: str) -> bool:
    """Whether nobody between us and the server can change a body: TLS, or this very host."""
    if not url.startswith("http://"):
        return True
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _certificates(options: _Options) -> dict[str, Any]:
    verify = options.any("client_kwargs", "verify")
    option = options.where("client_kwargs", "verify")
    if verify is None:
        verify, option = _env("AWS_CA_BUNDLE") or True, "AWS_CA_BUNDLE"
    if isinstance(verify, bool):
        return {} if verify else {"allow_invalid_certificates": True}
    try:
        return {"root_certificate": Path(verify).read_bytes()}
    except (OSError, TypeError) as exc:
        raise ConfigError(f"{option}: no certificates can be read from {verify!r}: {exc}") from exc
