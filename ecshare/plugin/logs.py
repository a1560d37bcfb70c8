# SPDX-License-Identifier: Apache-2.0
"""Puts the suite's log lines where vLLM's own are: same stream, same format, same level."""

import logging

from ecshare.store.config import StoreConfig
from ecshare.store.secrets import masked_url

logger = logging.getLogger(__name__)

# kvshare is its own package and logs under its own name.
_NAMES = ("ecshare", "kvshare")


def log_as_vllm() -> None:
    """Give our loggers vLLM's handlers and level, unless the user has configured logging.

    Left to Python's defaults, a warning is one import away from silence: packages that vLLM loads
    were seen to raise the root logger's level (model_hosting_container_standards, with 0.30).
    Call it where a connector starts: by then vLLM has configured its own logger.
    """
    theirs = logging.getLogger("vllm")
    for name in _NAMES:
        ours = logging.getLogger(name)
        if ours.level == logging.NOTSET:
            ours.setLevel(theirs.level)
        if not ours.handlers and not logging.getLogger().handlers:
            ours.handlers = list(theirs.handlers)
            ours.propagate = theirs.propagate  # not twice, should the root get a handler later


def log_sharing(
    what: str, config: StoreConfig, namespace: str, *, saves: bool, loads: bool
) -> None:
    """Say what this engine shares, and where: the line that tells a user that it works.

    `what`: "embeddings" or "KV blocks". Nothing is said where it does neither.
    """
    does = " and ".join(verb for verb, is_so in (("saves", saves), ("loads", loads)) if is_so)
    if does:
        where = masked_url(config.url)
        logger.info("this engine %s %s: %s, namespace %s", does, what, where, namespace)
