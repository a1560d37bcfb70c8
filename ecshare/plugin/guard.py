# SPDX-License-Identifier: Apache-2.0
"""A guard around vLLM's hooks: a bug of ours ends the sharing, not the engine.

vLLM ends the engine when a hook of a connector raises. So each hook of ours is guarded. The first
exception is logged with its traceback and counted, and the half gives up: from then on it shares
nothing, and its hooks give the answers that stand for "nothing". Some hooks have promised something
that vLLM waits for: they keep the promise by a simpler way, or report that it cannot be kept.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

logger = logging.getLogger(__name__)


class Guard:
    """Records whether one half of a connector has given up. Ownership: the thread of the hooks."""

    def __init__(self, give_up: Callable[[], None]) -> None:
        """Guard one half. `give_up` is called once: the half counts it and releases what it can."""
        self.has_given_up = False
        self._give_up = give_up

    def give_up(self) -> None:
        """Share nothing from now on. The second call does nothing."""
        if self.has_given_up:
            return
        self.has_given_up = True
        try:
            self._give_up()
        except Exception:
            logger.exception("a half that gave up cannot release all that it holds")

    def caught(self, hook: str, exc: Exception) -> None:
        """Log what `hook` has raised, if it is the first, and give up."""
        if self.has_given_up:
            logger.debug("%s failed too", hook, exc_info=exc)
            return
        logger.error(
            "a bug of this connector, in %s: it shares nothing until the engine is restarted, and "
            "the engine serves on without it. Please report it with what follows",
            hook,
            exc_info=exc,
        )
        self.give_up()


Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(
    nothing: Callable[[], Any], instead: Callable[..., Any] | None = None, *, goes_on: bool = False
) -> Callable[[Hook], Hook]:
    """Make a method of a connector, which has a `guard`, a hook that never raises an Exception.

    Once the half has given up, `instead` is called in its place with the same arguments. Without
    `instead`, or if that raises too, `nothing` returns the answer. `goes_on`: the hook is still
    called after the half has given up, and the others answer only when it raises.
    """

    def guard(hook: Hook) -> Hook:
        name = hook.__name__

        @wraps(hook)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if goes_on or not self.guard.has_given_up:
                try:
                    return hook(self, *args, **kwargs)
                except Exception as exc:  # noqa: BLE001 — no exception may reach vLLM
                    self.guard.caught(name, exc)
            if instead is not None:
                try:
                    return instead(self, *args, **kwargs)
                except Exception as exc:  # noqa: BLE001
                    self.guard.caught(name, exc)
            return nothing()

        return cast(Hook, call)

    return guard
