# SPDX-License-Identifier: Apache-2.0
"""ECShareConnector: the class vLLM loads.

A role-routed shell, one instance a process. The scheduler half decides and fetches; the worker half
moves embeddings between the encoder cache and this host. Each hook below is one call to the half of
this process; the other half does not exist here.

A hook never raises (ecshare.plugin.guard). vLLM takes "has the item" as a promise: a half that has
given up still loads what was promised, and fails requests whose items can no longer be had.

vLLM imports this module in its front-end process too, so nothing heavy is imported at the top.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole

from ecshare.encoder.config import OPTIONS_PATH, EncoderConfig
from ecshare.encoder.messages import Orders, Report
from ecshare.plugin.guard import Guard, guarded
from ecshare.plugin.logs import log_as_vllm
from ecshare.store.config import parse

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

    from ecshare.encoder.scheduler.scheduler import EncoderScheduler
    from ecshare.encoder.worker import EncoderWorker


def _none() -> None:
    return None


class ECShareConnector(ECConnectorBase):
    """Shares vision embeddings through object storage; docs/architecture.md has the data path."""

    scheduler: "EncoderScheduler"  # scheduler process only
    worker: "EncoderWorker"  # worker processes only

    def __init__(self, vllm_config: "VllmConfig", role: ECConnectorRole) -> None:
        """Parse the options and start the half for `role`.

        Raises:
            ConfigError: an option is wrong or the store cannot be used; names the option.
        """
        log_as_vllm()
        super().__init__(vllm_config, role)
        transfer = vllm_config.ec_transfer_config
        assert transfer is not None  # super() has checked it
        config = parse(EncoderConfig, transfer.ec_connector_extra_config, OPTIONS_PATH)
        # Not at the top: each half imports modules that the other process must not load.
        if role is ECConnectorRole.SCHEDULER:
            from ecshare.encoder.scheduler.scheduler import EncoderScheduler

            self.scheduler = EncoderScheduler.start(vllm_config, config)
            self.guard = Guard(self.scheduler.give_up)
        else:
            from ecshare.encoder.worker import EncoderWorker
            from ecshare.plugin.ranks import worker_rank

            self.worker = EncoderWorker.start(vllm_config, config, worker_rank(vllm_config))
            self.guard = Guard(self.worker.give_up)

    @guarded(_none, goes_on=True)
    def shutdown(self) -> None:
        """Wait briefly for loads and saves in flight, and stop the I/O thread."""
        half = self.scheduler if self.role is ECConnectorRole.SCHEDULER else self.worker
        half.close()

    # --- worker processes ---

    @guarded(_none)
    def start_save_caches(self, **kwargs: Any) -> None:
        """Take this step's save orders; store what `encoder_cache` holds already."""
        self.worker.begin_saves(self._orders(), kwargs["encoder_cache"])

    def _load_promised(self, encoder_cache: "dict[str, torch.Tensor]", **kwargs: Any) -> None:
        self.worker.load_rest(self._orders(), encoder_cache)

    @guarded(_none, _load_promised)
    def start_load_caches(self, encoder_cache: "dict[str, torch.Tensor]", **kwargs: Any) -> None:
        """Fill the encoder cache with this step's loads."""
        self.worker.load(self._orders(), encoder_cache)

    @guarded(_none)
    def save_caches(
        self, encoder_cache: "dict[str, torch.Tensor]", mm_hash: str, **kwargs: Any
    ) -> None:
        """Store a freshly encoded item. The V1 runner calls this in every role."""
        if self.is_producer:
            self.worker.save(mm_hash, encoder_cache)

    def _write_totals(self, finished_req_ids: set[str]) -> tuple[None, None]:
        self.worker.write_totals()
        return None, None

    @guarded(lambda: (None, None), _write_totals)
    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        """End the step. With `save = "durable"`, wait for the step's saves, bounded."""
        self.worker.settle()
        return None, None

    @guarded(lambda: Report({0: {"gave_up/worker": 1}}), goes_on=True)
    def build_connector_worker_meta(self) -> Report | None:
        """Return the worker's report; None if nothing is new."""
        return self.worker.report()

    # --- scheduler process ---

    def _can_do_without(self, request: "Request", num_computed_tokens: int) -> bool:
        return self.scheduler.can_do_without(request, num_computed_tokens)

    @guarded(lambda: True, _can_do_without)
    def ensure_cache_available(self, request: "Request", num_computed_tokens: int) -> bool:
        """Return False while this host still fetches an item that `request` needs."""
        return self.scheduler.ready(request, num_computed_tokens)

    def _is_promised(self, identifier: str) -> bool:
        return self.scheduler.is_promised(identifier)

    @guarded(lambda: False, _is_promised)
    def has_cache_item(self, identifier: str) -> bool:
        """Return True if the item need not be encoded: this host has verified and pinned it."""
        return self.scheduler.has(identifier)

    def _keep_promise(self, request: "Request", index: int) -> None:
        self.scheduler.keep_promise(request.mm_features[index].identifier)

    @guarded(_none, _keep_promise)
    def update_state_after_alloc(self, request: "Request", index: int) -> None:
        """Record that item `index` of `request` is to be encoded, or loaded, in this step."""
        self.scheduler.allocated(request, index)

    def _promised_orders(self, scheduler_output: "SchedulerOutput") -> Orders:
        return self.scheduler.promised_orders()

    @guarded(Orders, _promised_orders)
    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> Orders:
        """Return this step's orders for the workers."""
        orders = self.scheduler.orders(
            scheduler_output.num_scheduled_tokens, scheduler_output.free_encoder_mm_hashes
        )
        if self.scheduler.has_lost_worker:
            self.guard.give_up()
        return orders

    @guarded(_none)
    def update_connector_output(self, connector_output: "ECConnectorOutput") -> None:
        """Take the workers' report."""
        self.scheduler.reported(connector_output.ec_connector_worker_meta)

    @guarded(lambda: (False, None))
    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """Release the request's items; a producer announces them to the client.

        The first value is always False: True would leak the request on an engine without KV.
        """
        return False, self.scheduler.finished(request)

    def _take_lost(self) -> set[str]:
        return self.scheduler.take_lost()

    @guarded(set, _take_lost)
    def take_unavailable_requests(self) -> set[str]:
        """Return the requests whose embedding is gone and that carry nothing to encode from."""
        return self.scheduler.take_unavailable()

    # --- statistics; both processes ---

    # The oldest supported release of vLLM has no types of its own for statistics. Ours have the
    # methods of the later ones.

    @guarded(_none, goes_on=True)
    def get_ec_connector_stats(self) -> Any:
        """Return the counts since the last call. Workers report theirs to the scheduler half."""
        if self.role is not ECConnectorRole.SCHEDULER:
            return None
        return self.scheduler.take_stats()

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Wrap counts that vLLM passed as a plain dict."""
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
        """Register the Prometheus metrics of ecshare.encoder.metrics."""
        from ecshare.encoder.metrics import METRICS
        from ecshare.plugin.metrics import PrometheusCounters

        return PrometheusCounters(
            "ecshare", METRICS, metric_types, labelnames, per_engine_labelvalues
        )

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders
