# SPDX-License-Identifier: Apache-2.0
"""The options of both connectors, and the parser from a user's dict to a frozen type."""

import difflib
import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from ecshare.store.cloud_accounts import (
    AZURE,
    CLOUDS,
    GCS,
    S3,
    azure_account,
    gcs_endpoint,
    s3_endpoint,
)
from ecshare.store.errors import ConfigError
from ecshare.store.secrets import (
    check_levels,
    masked,
    masked_url,
    resolved,
    secret_values,
    warnings,
)

MIB = 1 << 20
GIB = 1 << 30

T = TypeVar("T", bound=Struct)

_MSGSPEC_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")


class StoreConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options that every connector needs for its store."""

    url: str
    """The place of the objects: `/folder`, `file:///folder`, `s3://bucket/prefix`,
    `az://container/prefix`, `abfs://container@account.dfs.core.windows.net/prefix`,
    `gs://bucket/prefix`, or any url that an installed fsspec filesystem understands."""

    storage_options: dict[str, Any] = {}
    """Options of the store. For S3, Azure and Google Cloud they have obstore's names, also with
    `aws_`, `azure_` or `google_` in front, or those of fsspec's clients. For S3: `key`, `secret`,
    `token`, `profile`, `endpoint_url`, `region`, `anon`, `requester_pays`, `verify` (a file of
    certificates, or false), `virtual_hosted_style_request`, `unsigned_payload`,
    `server_side_encryption`, `sse_kms_key_id`, and s3fs's `client_kwargs`; without keys, the usual
    credentials are used: AWS environment variables, profiles, roles. For Azure: `account_name`,
    `account_key`, `sas_token`, `token`, `connection_string`, `client_id`, `client_secret`,
    `tenant_id`, `endpoint` or `account_host`, `anon`; without credentials, its environment
    variables, workload and managed identity. For Google Cloud: `token` (a file of a service
    account, or `"anon"`), `service_account`, `application_credentials`, `endpoint_url`; without
    them, the application default credentials. Google Cloud was tested only with an imitation of its
    API. An option that obstore does not have opens the store through s3fs, adlfs or gcsfs, which is
    slower; the log names it. Any text may be written as `env:NAME` or `file:/path`, and every
    secret should be: see [Secrets](#secrets)."""

    folder_access: Literal["user", "group"] = "user"
    """Who may use a store in a folder: only this user, or all users of the folder's group, also in
    other containers and on other hosts. For `"group"`, first make the folder for a group that has
    all of these users: `install -d -m 2770 -g GROUP /folder`."""

    epoch: Annotated[str, Meta(max_length=128)] = ""
    """Any text. Only engines with the same text share objects. For weights that change while
    engines run there is [`ecshare epoch`](upkeep.md#when-a-model-changes)."""

    wait_s: Annotated[float, Meta(gt=0, le=3600)] = 5.0
    """Seconds that a request may wait for a look-up, or for an announced object."""

    io_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """Seconds after which an operation on the store has failed."""

    buffer_bytes: Annotated[int, Meta(gt=0)] = GIB
    """Host memory for saves in flight. If it is used up, an embedding is not saved, or its step
    waits if saves are durable or the engine only encodes; KV is saved by a later step. An object
    larger than this is saved when no other save is in flight. A GPU worker pins all of it at start,
    or as much as one chunk of KV takes; embeddings that are loaded pass through it too. For KV on
    GPUs of one host the default is what two steps compute, if that is more than 1 GiB: at most 4
    GiB, and all ranks together a sixteenth of the memory that the host or container has."""

    host_cache_dir: str | None = None
    """The folder of verified objects, which all engines of this user on this host share. Default:
    `/dev/shm/ecshare-<uid>`; in `/tmp` if `/dev/shm` is small; with another name if that one
    belongs to another user."""

    host_cache_bytes: Annotated[int, Meta(gt=0)] = 4 * GIB
    """The limit of that folder, and at most half of its file system, because others need `/dev/shm`
    too. 1 GiB of the file system stays free; a quarter, if it is smaller than 4 GiB. The least
    recently used objects are removed first. If engines or connectors that share the folder have
    different limits, the smallest one counts."""

    integrity_key: str = ""
    """A secret of all engines. Each object then carries a MAC made with it, and objects without the
    right MAC count as missing. Write `env:NAME` or `file:/path`; the key itself is possible, but
    visible to others. It must be at least 32 random bytes: `openssl rand -hex 32`."""

    accepted_integrity_key: str = ""
    """A second key, with which no MAC is made: objects that carry its MAC are valid too. For the
    time in which a key is [changed](security.md#changing-the-key)."""

    integrity_name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,64}\Z")] = ""
    """What stands for the key in the namespace, so that the objects stay when the key is
    [changed](security.md#changing-the-key). Only engines with the same name share objects. Default:
    the key's fingerprint."""

    tenant: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,64}\Z")] = ""
    """Whose engine this is. Only engines of the same [tenant](upkeep.md#tenants) share objects, and
    a budget of theirs is for the objects of this tenant alone."""

    @property
    def folder(self) -> str:
        """Return the store's folder, local or mounted; "" if the store is not a folder."""
        protocol, separator, rest = self.url.partition("://")
        if not separator:
            return self.url
        return rest.removeprefix("localhost") if protocol in ("file", "local") else ""

    @property
    def call_timeout_s(self) -> float:
        """Return the seconds for which a caller waits for a few operations on the store."""
        return 6 * self.io_timeout_s

    def store_id(self) -> str:
        """Return 16 hex digits that identify the store by url and endpoint, without credentials.

        For Azure the account counts too, because names of containers are unique only within one. If
        one store is written in two ways it may have two ids, and two entries in the host cache.
        """
        place = self.url.removeprefix("file://").rstrip("/")
        cloud = CLOUDS.get(self.url.partition("://")[0])
        if cloud is AZURE:
            name, endpoint = azure_account(self.url, self.storage_options)
            return _digest(f"{endpoint}\n{name}\n{place}")
        if cloud is GCS:
            return _digest(f"{gcs_endpoint(self.storage_options)}\n{place}")
        endpoint = S3.written(self.storage_options).get("endpoint") or s3_endpoint()
        return _digest(f"{endpoint}\n{place}")

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.for_log().items())
        return f"{type(self).__name__}({fields})"

    def for_log(self) -> dict[str, Any]:
        """Return all options as plain values, secrets masked."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        options = {"storage_options": masked(self.storage_options)}
        return {**shown, **masked(self._keys), **options, "url": masked_url(self.url)}

    def secrets(self) -> set[str]:
        """Return the texts that no message about the store may contain."""
        return secret_values(self.storage_options)

    def warnings(self, path: str) -> list[str]:
        """Return a sentence, with the fix, for each secret that others can read; see `parse`."""
        return warnings(self.url, self.storage_options, self._keys, path)

    @property
    def _keys(self) -> dict[str, str]:
        names = ("integrity_key", "accepted_integrity_key")
        return {name: getattr(self, name) for name in names}


class ConnectorConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of both connectors."""

    save_after: Annotated[int, Meta(ge=1, le=100)] = 1
    """How many requests must have had a media item, or a chunk of KV in their prompts, before this
    engine stores it. With 2, an item that is requested only once is not stored. At least the latest
    262,144 sightings count. Data that another engine waits for is stored at once: all embeddings of
    an engine that only encodes, and a prompt that [is for another engine](kv.md#saves)."""

    max_bytes: Annotated[int, Meta(gt=0)] | None = None
    """The most bytes of embeddings, or of KV, in the store. The engines that store clean it, one of
    them at a time: what was not used for longest goes first. Use the same value on all engines; of
    different ones the smallest counts. Default: [no limit](upkeep.md)."""

    ttl_hours: Annotated[float, Meta(gt=0)] | None = None
    """Embeddings, or KV, that no engine has used for so many hours are removed from the store, as
    with `max_bytes`."""

    preload_bytes: Annotated[int, Meta(ge=0)] = 0
    """The most bytes that an engine brings into the host cache after it has started, of what was
    used last, in the background, for ten minutes at most. 0: none. It does so while it has nothing
    else to load: see [warm.md](warm.md#a-hosts-cache)."""


def parse(cls: type[T], raw: Mapping[str, Any], path: str) -> T:
    """Read the options `raw`, which the user wrote at the JSON path `path`, as a `cls`.

    `env:NAME` and `file:/path` in `storage_options` are replaced by the values.

    Raises:
        ConfigError: a field is unknown, missing, or of another type, or the value to which it
            refers does not exist. The message names the field.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: expected an object of options, got {_kind(raw)}")
    check_levels(raw, path)
    known = [field.encode_name for field in msgspec.structs.fields(cls)]
    for name in raw:
        if name not in known:
            raise ConfigError(f"{path}.{name}: unknown option; {suggestion(str(name), known)}")
    try:
        options = msgspec.convert(dict(raw), cls)
    except msgspec.ValidationError as exc:
        raise ConfigError(_sentence(str(exc), path)) from exc
    if isinstance(options, StoreConfig):
        found = resolved(options.storage_options, f"{path}.storage_options")
        options = msgspec.structs.replace(options, storage_options=found)
    return options


def suggestion(name: str, known: list[str]) -> str:
    """Return the text that follows "unknown": the nearest known name, or all of them."""
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"


def _sentence(message: str, path: str) -> str:
    """Return a message of msgspec with the user's path in front, instead of `$.x` at the end."""
    missing = re.match(r"Object missing required field `(\w+)`", message)
    if missing:
        return f"{path}.{missing[1]}: missing, and it has no default"
    at = _MSGSPEC_PATH.search(message)
    where = f"{path}.{at['path']}" if at and at["path"] else path
    what = (message[: at.start()] if at else message).replace("`", "")
    return f"{where}: {what[:1].lower()}{what[1:]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
