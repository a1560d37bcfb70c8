# SPDX-License-Identifier: Apache-2.0
"""Translates options of gcsfs to those of obstore. Uses no network."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecshare.store.accounts import gcs_endpoint
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

# A project is asked only when buckets are made or listed, or when it pays.
_MOOT = FSSPEC_MOOT | {
    "block_size", "cache_timeout", "check_connection", "consistency", "default_location",
    "project", "requests_timeout", "secure_serialize", "timeout",
}  # fmt: skip
_TRANSLATED = {"endpoint_url", "token"}
# Their default is what obstore does.
_GCSFS_ONLY = {"access": "full_control", "requester_pays": False, "session_kwargs": {}}
_GCSFS_WORDS = ("browser", "cache", "cloud")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


# A provider, whether anonymous, and obstore's other options.
_Identity = tuple[Credentials | None, bool, dict[str, Any]]


class GCSPlan(CloudPlan):
    """A bucket of Google Cloud Storage."""


def plan(config: StoreConfig, path: str) -> GCSPlan | str:
    """Translate `config`, or return why only fsspec can serve it.

    `path`: where the user wrote the options. Without a token obstore looks for the application
    default credentials, then for those of the machine.

    Raises:
        ConfigError: an option is unknown or of the wrong type, or a token cannot be read.
    """
    options = Options(config.storage_options, path, _MOOT | _TRANSLATED | set(_GCSFS_ONLY))
    bucket, prefix = bucket_and_prefix(
        config.url.partition("://")[2],
        _BUCKET,
        f"{masked_url(config.url)!r} names no bucket; write gs://bucket/prefix",
        f"{path}.url",
    )
    if not is_plain(prefix):
        return ODD_PREFIX
    for name, default in _GCSFS_ONLY.items():
        if name in options and options.get(object, name) != default:
            return f"only gcsfs knows the option {name}"
    options.text("endpoint_url")
    endpoint = checked_endpoint(gcs_endpoint(config.storage_options), options.where("endpoint_url"))
    identity = _identity(options)
    if isinstance(identity, str):
        return identity
    credentials, anonymous, secrets = identity
    return GCSPlan(
        bucket=bucket,
        prefix=prefix,
        credentials=credentials,
        client={"allow_http": endpoint.startswith("http://")},
        config={"skip_signature": anonymous, **({"base_url": endpoint} if endpoint else {})},
        secrets=secrets,
    )


def _identity(options: Options) -> _Identity | str:
    """Return the identity that the options give, or why gcsfs must open the bucket."""
    token = options.get(object, "token")
    if isinstance(token, Mapping):
        return _from_account(dict(token), {"service_account_key": json.dumps(dict(token))})
    if token is None or token == "google_default":
        return None, False, {}
    if not isinstance(token, str):
        return f"only gcsfs knows a token that is a {type(token).__name__}"
    if token == "anon":
        # A provider all the same: without one obstore asks the machine's metadata server before
        # each write, anonymous or not.
        return _bearer(""), True, {}
    if token in _GCSFS_WORDS:
        return f"only gcsfs knows the token {token!r}"
    token = options.text("token")
    if token.lstrip().startswith("{"):  # the file's text, as env:NAME and file:/path give it
        return _from_text(token, options.where("token"))
    # What looks like a file is not sent away as a secret because it is misspelt.
    if token.startswith("/") or token.endswith(".json") or os.path.exists(token):  # noqa: PTH110
        return _from_file(Path(token), options.where("token"))
    return _bearer(token), False, {}


def _bearer(token: str) -> Credentials:
    return lambda: {"token": token, "expires_at": None}


def _from_text(text: str, option: str) -> _Identity | str:
    try:
        account = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{option}: it begins as JSON does, and is none") from None
    return _from_account(account, {"service_account_key": text})


def _from_file(file: Path, option: str) -> _Identity | str:
    try:
        account = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        kind = type(exc).__name__
        raise ConfigError(f"{option}: no credentials can be read from that file ({kind})") from exc
    if isinstance(account, dict) and account.get("type") == "authorized_user":
        return None, False, {"application_credentials": str(file)}
    return _from_account(account, {"service_account": str(file)})


def _from_account(account: object, options: dict[str, Any]) -> _Identity | str:
    kind = account.get("type") if isinstance(account, dict) else None
    if kind != "service_account":
        return f"only gcsfs knows a token of the type {str(kind)[:40]!r}"
    return None, False, options
