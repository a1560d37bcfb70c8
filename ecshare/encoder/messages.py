# SPDX-License-Identifier: Apache-2.0
"""Messages between the two halves of the encoder-cache connector.

The halves run in different processes. vLLM passes these objects, pickled, with each step.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorWorkerMetadata,
)

from ecshare.store.keys import Key


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Put the embedding stored under `key` into the encoder cache as `identifier`."""

    identifier: str
    key: Key


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Store the embedding of `identifier` under `key`, once it is in the encoder cache.

    `attributes` go into the object's header: the number of embeddings and the placeholder metadata.
    """

    identifier: str
    key: Key
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Orders(ECConnectorMetadata):
    """Scheduler half -> every worker, once a step. Filled by `EncoderScheduler.orders`."""

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    num_stops: int = 0
    """How often sharing was stopped, because weights are updated. Save orders from before are
    void."""


@dataclass(frozen=True)
class Report(ECConnectorWorkerMetadata):
    """Workers -> scheduler half, after a step.

    The V1 runner of an engine that only encodes drops reports. So counts, and with them the fact
    that a worker has given up, are also passed by a file (ecshare.plugin.ledger). An embedding
    whose load is not reported is pinned longer; nothing else depends on the report.
    """

    totals: dict[int, dict[str, float]] = field(default_factory=dict)
    """By rank, the counts since its start. A total that is reported twice counts once."""
    loaded: frozenset[str] = frozenset()
    """Keys whose load orders were carried out."""

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        """Return both workers' reports as one."""
        assert isinstance(other, Report)
        return Report({**self.totals, **other.totals}, self.loaded | other.loaded)
