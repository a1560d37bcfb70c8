# SPDX-License-Identifier: Apache-2.0
"""Sends our log lines where vLLM sends its own: same stream, format and level."""

import logging

from ecshare.store.config import StoreConfig
from ecshare.store.hostcache.cache import HostCache
from ecshare.store.secrets import masked_url

logger = logging.getLogger(__name__)

# kvshare is a package of its own, and logs under its own name.
_NAMES = ("ecshare", "kvshare")


def log_as_vllm() -> None:
    """Give our loggers vLLM's handlers and level, unless the user has configured logging.

    With Python's defaults our warnings may be dropped: a package that vLLM loads may raise the root
    logger's level (model_hosting_container_standards does, with 0.30). Call it where a connector
    starts: vLLM has configured its own logger by then.
    """
    theirs = logging.getLogger("vllm")
    for name in _NAMES:
        ours = logging.getLogger(name)
        if ours.level == logging.NOTSET:
            ours.setLevel(theirs.level)
        if not ours.handlers and not logging.getLogger().handlers:
            ours.handlers = list(theirs.handlers)
            ours.propagate = theirs.propagate  # or lines repeat if the root gets a handler later


def log_sharing(
    what: str, config: StoreConfig, namespace: str, *, saves: bool, loads: bool
) -> None:
    """Log what this engine shares, and where, so that a user sees that sharing works.

    `what`: "embeddings" or "KV blocks". Logs nothing if the engine neither saves nor loads.
    """
    does = " and ".join(verb for verb, is_so in (("saves", saves), ("loads", loads)) if is_so)
    if does:
        where = masked_url(config.url)
        logger.info("this engine %s %s: %s, namespace %s", does, what, where, namespace)


def log_host_cache(host: HostCache) -> None:
    """Log how much of this host's memory, or of a disk, the host cache may take."""
    logger.info(
        "host cache %s: at most %d MiB, and less where its file system would have less than %d MiB "
        "free",
        host.root,
        host.limit_bytes >> 20,
        host.floor_bytes >> 20,
    )
