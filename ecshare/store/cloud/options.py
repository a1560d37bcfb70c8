# SPDX-License-Identifier: Apache-2.0
"""The common part of the translation of S3, Azure and Google Cloud options to obstore's.

Options keep the names that they have in s3fs, adlfs and gcsfs. If an option has no counterpart in
obstore, the url is opened by fsspec, and the log names the option.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ecshare.store.config import suggestion
from ecshare.store.errors import ConfigError
from ecshare.store.secrets import masked_url

Credentials = Callable[[], dict[str, Any]]

FSSPEC_MOOT = {
    "asynchronous", "batch_size", "default_block_size", "default_cache_type", "default_fill_cache",
    "listings_expiry_time", "loop", "max_concurrency", "max_paths", "skip_instance_cache",
    "use_listings_cache", "version_aware",
}  # fmt: skip
"""Options about caches, block sizes and event loops of fsspec: without meaning for obstore."""

# obstore percent-encodes other characters, fsspec does not: two engines would not meet.
_PLAIN_PREFIX = re.compile(r"[A-Za-z0-9!_.()=@+:,'/-]*")
ODD_PREFIX = "the prefix has characters that obstore would encode"


@dataclass(frozen=True)
class CloudPlan:
    """All that obstore needs to open a bucket."""

    bucket: str
    """Azure calls it a container."""
    prefix: str
    config: Mapping[str, Any]
    """Of obstore's S3Config, AzureConfig or GCSConfig; no secrets."""
    client: Mapping[str, Any]
    """Of obstore's ClientConfig."""
    credentials: Credentials | None = field(repr=False)
    """None: anonymous, or obstore's own search."""
    secrets: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """More entries of `config`, which are secret."""


class Options:
    """`storage_options`, read by name and type. Each error names the option by the user's path."""

    def __init__(self, raw: Mapping[str, Any], path: str, known: Collection[str]) -> None:
        """Read `raw`. `path`: where the user wrote the options; `known`: names that may occur.

        Raises:
            ConfigError: an option has another name.
        """
        self._raw = {name: value for name, value in raw.items() if value is not None}
        self._path = f"{path}.storage_options"
        for name in self._raw:
            if name not in known:
                hint = suggestion(name, sorted(known))
                raise ConfigError(f"{self.where(name)}: unknown option; {hint}")

    def __contains__(self, name: str) -> bool:
        return name in self._raw

    def where(self, *names: str) -> str:
        """Return the user's path of an option."""
        return ".".join((self._path, *names))

    def first_of(self, names: Collection[str]) -> str | None:
        """Return the first of `names`, in alphabetical order, that was given; None if none was."""
        return next((name for name in sorted(names) if name in self._raw), None)

    def text(self, *names: str) -> str:
        """Return the string at that path, "" if there is none.

        Raises:
            ConfigError: it is empty, or not a string.
        """
        value = self.get(str, *names)
        if value == "":
            raise ConfigError(f"{self.where(*names)}: is empty; leave it out, or fill it in")
        return value or ""

    def flag(self, *names: str, default: bool = False) -> bool:
        """Return the boolean at that path, `default` if there is none.

        Raises:
            ConfigError: it is not a boolean.
        """
        value = self.get(bool, *names)
        return default if value is None else bool(value)

    def get(self, kind: type, *names: str) -> Any:
        """Return the value at that path, None if there is none.

        Raises:
            ConfigError: it is not of type `kind`, or a value above it is not an object.
        """
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


def bucket_and_prefix(
    place: str, name: re.Pattern[str], refusal: str, option: str
) -> tuple[str, str]:
    """Split `bucket/prefix`. `option` names the url, and `refusal` says what is wrong with it.

    Raises:
        ConfigError: the bucket does not match `name`, or a level of the prefix is empty or dotted.
    """
    bucket, _, prefix = place.partition("/")
    prefix = prefix.strip("/")
    if not name.fullmatch(bucket):
        raise ConfigError(f"{option}: {refusal}")
    if prefix and any(level in ("", ".", "..") for level in prefix.split("/")):
        raise ConfigError(f"{option}: the prefix {prefix!r} has an empty or dotted level")
    return bucket, prefix


def is_plain(prefix: str) -> bool:
    """Whether obstore uses `prefix` unchanged."""
    return bool(_PLAIN_PREFIX.fullmatch(prefix))


def checked_endpoint(url: str, option: str) -> str:
    """Return `url` without a slash at its end.

    Raises:
        ConfigError: it is not an http or https url; names `option`.
    """
    if url and not _is_endpoint(url):
        raise ConfigError(
            f"{option}: {masked_url(url)!r} is no endpoint; write https://host or http://host:port"
        )
    return url.rstrip("/")


def _is_endpoint(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an address, or a port, that cannot be
        return False


def from_environment(*names: str) -> str:
    """Return the first of these environment variables that is not empty, "" if all are."""
    return next((os.environ[name] for name in names if os.environ.get(name)), "")
