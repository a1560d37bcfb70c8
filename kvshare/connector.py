# SPDX-License-Identifier: Apache-2.0
"""KVShareConnector: the class vLLM loads.

One instance per process, which delegates each hook to the half of its role. The scheduler half
plans loads and saves; the worker half moves blocks between the cache tensors and the store. The
other half does not exist in this process.

A hook never raises (ecshare.plugin.guard). vLLM keeps a request with a promised load waiting until
the load is reported. So this class tracks such requests itself. If its half has given up, it
reports them as failed as soon as nothing is written to their blocks any more.

vLLM imports this module in its front-end process too, so nothing heavy is imported at the top.
"""

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from ecshare.plugin.guard import Guard, guarded
from ecshare.plugin.logs import log_as_vllm
from ecshare.store.config import parse
from ecshare.store.errors import ConfigError
from kvshare.compat import cache_hit_source, start_loads_first
from kvshare.config import OPTIONS_PATH, KVConfig
from kvshare.messages import Orders, Report

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from ecshare.plugin.metrics import CounterStats
    from kvshare.scheduler.scheduler import KVScheduler
    from kvshare.worker.worker import KVWorker

logger = logging.getLogger(__name__)

# The connectors of this process with a scheduler half that is not shut down.
_open_connectors: "WeakSet[KVShareConnector]" = WeakSet()


def _none() -> None:
    return None


def _no_announcement() -> tuple[bool, None]:
    return False, None


class KVShareConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector that shares KV blocks through object storage; see docs/architecture.md."""

    scheduler: "KVScheduler"  # scheduler process only
    worker: "KVWorker"  # worker processes only

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        """Parse the options and start the half for `role`.

        Raises:
            ConfigError: an option is wrong or the store cannot be used; names the option.
        """
        log_as_vllm()
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        config = parse(KVConfig, transfer.kv_connector_extra_config, OPTIONS_PATH)
        # Imported here: these modules import what a process without this half must not load.
        if "buffer_bytes" not in transfer.kv_connector_extra_config:
            from kvshare.buffer_size import with_default_buffer

            config = with_default_buffer(config, vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            from kvshare.scheduler.scheduler import KVScheduler

            self._refuse_second()
            self.scheduler = KVScheduler.start(vllm_config, kv_cache_config, config)
            self.guard = Guard(self.scheduler.give_up)
            self._promised: set[str] = set()  # requests whose load was not sent to the workers yet
            if transfer.kv_load_failure_policy != "recompute":
                # vLLM's scheduler reads it after it has created this object.
                transfer.kv_load_failure_policy = "recompute"
                logger.info(
                    "kv_load_failure_policy is set to 'recompute': vLLM computes KV that a load "
                    "has lost, and no request fails. Below MultiConnector this has no effect: set "
                    "it in the options of MultiConnector."
                )
            _open_connectors.add(self)
        else:
            from ecshare.plugin.ranks import worker_rank
            from kvshare.worker.worker import KVWorker

            rank = worker_rank(vllm_config)
            self.worker = KVWorker.start(vllm_config, kv_cache_config, config, rank)
            self.guard = Guard(self.worker.give_up)
            self._unreported: set[str] = set()  # requests with an ordered load that is not reported
            self._refused: set[str] = set()  # requests to report as failed
            self._invalid_blocks: set[int] = set()

    def _refuse_second(self) -> None:
        """Raise ConfigError if this engine already has a KVShareConnector, below MultiConnector.

        The announcements of both would have one name, so each would wait for objects of the other
        one's store. MultiConnector gives each child a copy of the engine's configuration; the parts
        of the copies are the same objects.
        """
        own = self._vllm_config
        others = (other._vllm_config for other in _open_connectors)
        if any(each is not own and each.cache_config is own.cache_config for each in others):
            raise ConfigError(
                "kv_connector_extra_config.connectors: an engine can have one KVShareConnector; "
                "leave the others out. Its host cache is the near tier before its store: "
                "host_cache_dir, host_cache_bytes"
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is dropped is a later miss, never a failure."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return True: the worker half releases the cache before vLLM frees its memory."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """Return the layout that keeps blocks equal where layers have several shapes."""
        from kvshare.chunks.layouts import layout_for

        return layout_for(vllm_config)

    @guarded(_none, goes_on=True)
    def shutdown(self) -> None:
        """Give jobs in flight a few seconds to end, and stop the I/O thread."""
        _open_connectors.discard(self)
        half = self.scheduler if self.role is KVConnectorRole.SCHEDULER else self.worker
        half.close()

    # --- worker processes ---

    @guarded(_none)
    def handle_preemptions(self, kv_connector_metadata: "KVConnectorMetadata") -> None:
        """Save the contents of freed blocks; called before this step can refill them."""
        assert isinstance(kv_connector_metadata, Orders)
        self.worker.save_leaving(kv_connector_metadata)

    @guarded(_none)
    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Use vLLM's cache tensors, one per layer, from now on."""
        self.worker.register(kv_caches)

    def _release_cache(self) -> None:
        self.worker.release_cache()

    @guarded(_none, _release_cache)
    def unregister_kv_caches(self) -> None:
        """Neither read nor write the cache until `restore_kv_caches`: vLLM goes to sleep."""
        self.worker.unregister()

    @guarded(_none)
    def restore_kv_caches(self) -> None:
        """Use the cache again: vLLM has woken up, and the tensors have their old addresses."""
        self.worker.restore()

    def _refuse_loads(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        orders = self._orders()
        self._refused |= orders.refused
        self._unreported.update(order.request_id for order in orders.loads)

    @guarded(_none, _refuse_loads)
    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Start this step's loads; `get_transfer_results` reports their ends."""
        self._refuse_loads(forward_context)
        self.worker.load(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous, and a request runs once its load has ended."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """Do nothing: CUDA graphs skip this hook, so blocks are saved after the forward pass."""

    @guarded(_none)
    def wait_for_save(self) -> None:
        """Start this step's saves. The blocks may be refilled, in stream order, on return."""
        self.worker.save(self._orders())

    def _failed_loads(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self.worker.has_stopped_loads():
            self._refused |= self._unreported
            self._unreported = set()
        failed, self._refused = self._refused, set()
        return KVConnectorTransferResults(finished_recving=failed, failed_recving=set(failed))

    @guarded(KVConnectorTransferResults, _failed_loads)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose load has ended, and those that loaded nothing; each once."""
        self.worker.wait_idle(self._orders())
        finished = self.worker.settle()
        # In the same step as the requests: vLLM would run a request on the garbage in lost blocks.
        self._invalid_blocks |= finished.invalid_blocks
        self._unreported -= finished.requests
        refused, self._refused = self._refused, set()
        return KVConnectorTransferResults(
            finished_recving=finished.requests | refused, failed_recving=finished.failed | refused
        )

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not filled; vLLM keeps a request's tokens before them."""
        taken, self._invalid_blocks = self._invalid_blocks, set()
        return taken

    @guarded(lambda: Report(frozenset(), is_idle=True), goes_on=True)
    def build_connector_worker_meta(self) -> Report | None:
        """Return the report for the scheduler half; None if there is nothing to report."""
        return self.worker.report()

    # --- scheduler process ---

    @guarded(_none)
    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Use this KV cache manager, which knows how many blocks are free, from now on."""
        self.scheduler.bind(kv_cache_manager)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, asynchronously; (None, False): ask again."""
        num_tokens = self.scheduler.num_loadable_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def _promise(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self._promised.add(request.request_id)

    @guarded(_none, _promise)
    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Record the blocks that the request's load, if any, is to fill."""
        self._promise(request, blocks, num_external_tokens)
        block_ids = blocks.get_block_ids() if num_external_tokens else ()
        self.scheduler.allocated(request, block_ids, num_external_tokens)
        self.scheduler.admitted(request, blocks.get_block_ids, num_external_tokens)

    def _refuse_promised(self, scheduler_output: "SchedulerOutput") -> Orders:
        promised, self._promised = self._promised, set()
        return Orders("", refused=frozenset(promised))

    @guarded(lambda: Orders(""), _refuse_promised)
    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> Orders:
        """Return this step's orders for the workers."""
        orders = self.scheduler.orders(scheduler_output)
        if orders.loads:
            start_loads_first(scheduler_output)
        self._promised.clear()
        return orders

    @guarded(_none)
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Process the workers' report."""
        self.scheduler.reported(connector_output)

    @guarded(_no_announcement)
    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Remove the request; a producer returns an announcement of its stored and pending tokens.

        The first value is always False: saves are copied out in stream order, before any later
        step can refill the blocks.
        """
        return False, self.scheduler.finished(request)

    @guarded(_no_announcement)
    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Remove the request of a model with one cache group; see `request_finished_all_groups`."""
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(dict)
    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> dict[Any, int]:
        """Return the number of these tokens from each source, e.g. from this host's memory."""
        sources = self.scheduler.hit_sources(request, num_external_tokens)
        return {cache_hit_source(name): count for name, count in sources.items()}

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Return whether an idle engine is to keep stepping, so that the workers report saves."""
        return self.scheduler.is_crowded

    @guarded(list)
    def take_events(self) -> "list[KVCacheEvent]":
        """Return events for blocks that were stored or found lost, if vLLM's KV events are on."""
        return self.scheduler.take_events()

    @guarded(lambda: True)
    def reset_cache(self) -> bool:
        """Drop the state that refers to vLLM's cache; the store is unchanged."""
        self.scheduler.reset()
        return True

    # --- statistics; both processes ---

    @guarded(_none, goes_on=True)
    def get_kv_connector_stats(self) -> "CounterStats | None":
        """Return the counts of this half since the last call.

        In the scheduler process vLLM calls this once for each output that it processes, even if the
        workers have nothing to report. No other hook marks the end of each step.
        """
        if self.role is KVConnectorRole.SCHEDULER:
            self.scheduler.step_ended()
            return self.scheduler.take_stats()
        return self.worker.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> "CounterStats | None":
        """Return counts that were sent as a plain dict, as CounterStats."""
        from ecshare.plugin.metrics import CounterStats

        return CounterStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """Return the `PrometheusCounters` of this connector, registered."""
        from ecshare.plugin.metrics import PrometheusCounters
        from kvshare.metrics import METRICS

        return PrometheusCounters(
            "kvshare", METRICS, metric_types, labelnames, per_engine_labelvalues
        )

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders
