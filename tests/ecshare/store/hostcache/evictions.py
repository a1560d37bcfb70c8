# SPDX-License-Identifier: Apache-2.0
"""Wait for the threads that count and remove entries of a large host cache."""

import threading

from ecshare.store.hostcache.eviction import THREAD_NAME


def evicted() -> None:
    """Wait until no thread of this process counts or removes entries."""
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join()
