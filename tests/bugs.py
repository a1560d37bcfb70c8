# SPDX-License-Identifier: Apache-2.0
"""Hooks that raise, for tests of how engines survive it."""

from collections.abc import Callable
from typing import Any


def fails_from(hook: Callable[..., Any], nth_call: int) -> Callable[..., Any]:
    """Return `hook` with a bug: from the n-th call on it raises, before or after its work."""
    calls = 0

    def broken(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < nth_call:
            return hook(*args, **kwargs)
        if calls % 2 or hook.__name__ == "close":  # or its threads would outlive this test
            hook(*args, **kwargs)
        raise RuntimeError("a bug")

    return broken
