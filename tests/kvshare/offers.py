# SPDX-License-Identifier: Apache-2.0
"""A connector that reads each state that vLLM offers, after the forward pass of that step."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput

from tests.kvshare.toy import ToySibling, read_state
from tests.sibling import Loads


class Offer(NamedTuple):
    """A state that vLLM offered, and what lay in its block after the forward pass."""

    request_id: str
    group: int
    block: int
    num_tokens: int
    is_scheduled: bool
    """Whether the step computed tokens of the request."""
    states: list[bytes]
    """Of each layer of the group."""


@dataclass
class LoadsAndOffers(Loads):
    offered: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    scheduled: set[str] = field(default_factory=set)


class Recorder(ToySibling):
    """Also loads what requests name, as the sibling does."""

    steps: list[list[Offer]]
    """The offers of each step."""

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self.steps = []

    def build_connector_meta(self, scheduler_output: object) -> Loads:
        assert isinstance(scheduler_output, SchedulerOutput)
        told = scheduler_output.kv_connector_block_state
        assert told is not None
        loads = super().build_connector_meta(scheduler_output).loads
        scheduled = set(scheduler_output.num_scheduled_tokens)
        return LoadsAndOffers(loads, told.boundary_state_offloads, scheduled)

    def wait_for_save(self) -> None:
        told = self._get_connector_metadata()
        assert isinstance(told, LoadsAndOffers)
        self.steps.append(
            [
                Offer(name, *offer, name in told.scheduled, self._states(*offer[:2]))
                for name, offers in told.offered.items()
                for offer in offers
            ]
        )

    def _states(self, group: int, block: int) -> list[bytes]:
        return [read_state(self.caches[name], block) for name in self.groups[group].layer_names]
