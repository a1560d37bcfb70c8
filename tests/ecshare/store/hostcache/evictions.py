# SPDX-License-Identifier: Apache-2.0
"""The threads that count and remove what a large host cache holds."""

import threading

from ecshare.store.hostcache.eviction import THREAD_NAME


def evicted() -> None:
    """Return when no thread of this process counts or removes entries any more."""
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join()
