# SPDX-License-Identifier: Apache-2.0
"""Opens the store that a url names.

| url                                                | store                         | client  |
|----------------------------------------------------|-------------------------------|---------|
| `/folder`, `file:///folder`                        | `folder.store.DirectoryStore` | files   |
| `s3://bucket/prefix`, `s3a://`                     | `cloud.store.CloudStore`      | obstore |
| `az://container/prefix`, `abfs://`, `abfss://`     | `cloud.store.CloudStore`      | obstore |
| `gs://bucket/prefix`, `gcs://`                     | `cloud.store.CloudStore`      | obstore |
| the same, with an option that obstore lacks        | `fsspec.store.FsspecStore`    | fsspec  |
| any other url that fsspec can open                 | `fsspec.store.FsspecStore`    | fsspec  |

Backends are imported inside functions: their client packages are optional, and slow to import.
"""

import logging

from ecshare.store.cloud.plan import CloudPlan, plan
from ecshare.store.cloud_accounts import CLOUDS
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.objects import ObjectStore
from ecshare.store.secrets import masked_url

logger = logging.getLogger(__name__)


def open_store(config: StoreConfig, path: str) -> ObjectStore:
    """Return the store that `config` names. Uses no network; `probe` does.

    `path`: where the user wrote these options, e.g. "ec_connector_extra_config".

    Raises:
        ConfigError: the url or an option cannot work. The message names it and the fix.
    """
    protocol, _, rest = config.url.partition("://")
    if not rest and "://" not in config.url:
        protocol, rest = "file", config.url
    if "::" in config.url:
        raise ConfigError(
            f"{path}.url: chained urls ('::') are not supported; name the store alone"
        )
    if protocol in ("file", "local"):
        store, backend = _directory(config, rest, path), "files"
    else:
        store, backend = _bucket(config, protocol, path)
    logger.info("store %s is accessed through %s", masked_url(config.url), backend)
    return store


def _directory(config: StoreConfig, folder: str, path: str) -> ObjectStore:
    for name in config.storage_options:
        if name != "auto_mkdir":  # an option of fsspec; our store always makes its folders
            raise ConfigError(
                f"{path}.storage_options.{name}: a folder takes no options; leave it out"
            )
    if folder.startswith("localhost/"):
        folder = folder.removeprefix("localhost")
    if not folder.startswith("/"):
        raise ConfigError(
            f"{path}.url: {masked_url(config.url)!r} is not an absolute folder, and engines run in "
            "different working directories; write '/folder' or 'file:///folder', or a url such as 's3://bucket'"
        )
    return DirectoryStore.open(folder, f"{path}.url", is_shared=config.folder_access == "group")


def _bucket(config: StoreConfig, protocol: str, path: str) -> tuple[ObjectStore, str]:
    from ecshare.store.fsspec.store import open_fsspec

    found = plan(config, path) if protocol in CLOUDS else ""
    if isinstance(found, CloudPlan):
        try:
            from ecshare.store.cloud.store import open_cloud
        except ImportError:
            return open_fsspec(config, path), "fsspec, because obstore is not installed"
        return open_cloud(found, config.io_timeout_s, path, config.secrets()), "obstore"
    return open_fsspec(config, path, found), f"fsspec, because {found}" if found else "fsspec"
