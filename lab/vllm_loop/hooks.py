# SPDX-License-Identifier: Apache-2.0
"""A record of the hooks that are called on a connector: their order and durations."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from time import perf_counter
from typing import Any

EC_SCHEDULER_HOOKS = (
    "ensure_cache_available",
    "has_cache_item",
    "update_state_after_alloc",
    "update_state_after_free",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "take_unavailable_requests",
    "has_pending_push_work",
    "get_ec_connector_stats",
)
EC_WORKER_HOOKS = (
    "bind_connector_metadata",
    "clear_connector_metadata",
    "start_save_caches",
    "start_load_caches",
    "save_caches",
    "get_finished",
    "build_connector_worker_meta",
    "get_ec_connector_stats",
)
KV_SCHEDULER_HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
)
KV_WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "clear_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "finish_forward",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
)


class HookFailed(Exception):
    """A hook raised: in vLLM this ends the engine. `__cause__` is the exception of the hook."""


@dataclass
class HookLog:
    """The calls of the hooks of one connector object."""

    calls: dict[str, list[float]] = field(default_factory=dict)
    """Hook -> seconds of each call."""
    order: list[str] = field(default_factory=list)
    """The hooks in the order of their calls."""
    io: set[str] = field(default_factory=set)
    """`hook: event` for each I/O of a hook, while something records these."""

    def num_calls(self, hook: str) -> int:
        """Return the number of calls of a hook."""
        return len(self.calls.get(hook, ()))

    def seconds(self, *hooks: str) -> float:
        """Return the seconds of all calls of these hooks."""
        return sum(sum(self.calls.get(hook, ())) for hook in hooks)

    def clear(self) -> None:
        """Drop all calls."""
        self.calls.clear()
        self.order.clear()
        self.io.clear()


class _Current(threading.local):
    log: HookLog | None = None
    hook: str = ""


current = _Current()
"""The hook that this thread is in."""


def watch(connector: Any, hooks: tuple[str, ...], log: HookLog) -> None:
    """Record in `log` each call of those of `hooks` that `connector` has.

    An exception of a hook becomes `HookFailed`.
    """
    for name in hooks:
        if hasattr(connector, name):
            setattr(connector, name, _watched(name, getattr(connector, name), log))


def _watched(name: str, hook: Callable[..., Any], log: HookLog) -> Callable[..., Any]:
    @wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        outer, current.log, current.hook = (current.log, current.hook), log, name
        log.order.append(name)
        start_s = perf_counter()
        try:
            return hook(*args, **kwargs)
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised)[:200]}"
            raise HookFailed(f"{name} raised {error}") from raised
        finally:
            log.calls.setdefault(name, []).append(perf_counter() - start_s)
            current.log, current.hook = outer

    return call
