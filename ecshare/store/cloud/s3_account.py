# SPDX-License-Identifier: Apache-2.0
"""Searches for AWS credentials, region and endpoint: environment, profile files, single sign-on,
roles, the instance.

This module uses botocore, because obstore supports neither profiles nor single sign-on, and the
provider in `obstore.auth` needs all of boto3.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from ecshare.store.cloud_accounts import s3_endpoint
from ecshare.store.errors import ConfigError

Credentials = Callable[[], dict[str, Any]]
S3Account = tuple[Credentials | None, str, str]
"""Credentials, region and endpoint; "": neither the environment nor the profile has one."""

_TTL = timedelta(minutes=10)  # botocore renews credentials itself; obstore asks us this often


def static(**credentials: str | None) -> Credentials:
    """Return a provider of `credentials`. As plain options, the environment could override some."""
    return lambda: {**credentials, "expires_at": None}


def searched(profile: str | None, path: str) -> S3Account:
    """Return what botocore finds. Without botocore, obstore itself searches.

    Raises:
        ConfigError: it finds nothing, or the profile cannot be used.
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
        return None, "", s3_endpoint()
    try:
        session = Session(profile=profile)
        found = session.get_credentials()
        region = str(session.get_config_variable("region") or "")
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
            "expires_at": datetime.now(UTC) + _TTL,
        }

    return provide, region, endpoint


def _of_profile(session: Any, path: str) -> str:
    """Return the endpoint that the profile in AWS's configuration gives for S3, or for all."""
    profile, sections = session.get_scoped_config(), session.full_config.get("services", {})
    name = profile.get("services")
    if name is not None and name not in sections:
        raise ConfigError(
            f"{path}.storage_options: the profile in AWS's configuration has services = {name}, "
            f"and there is no section [services {name}]"
        )
    of_s3 = sections.get(name, {}).get("s3", {})
    in_section = of_s3.get("endpoint_url") if isinstance(of_s3, Mapping) else None
    return str(in_section or profile.get("endpoint_url") or "")
