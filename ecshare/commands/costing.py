# SPDX-License-Identifier: Apache-2.0
"""Computes what storing, loading and computing cost, in money and in time; pure.

The sums of docs/costs.md are its test. GB are 10^9 bytes, a month has 30 days.
"""

from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

CHUNK_TOKENS = 256
_HITS_LOOK_UPS = 32  # existence look-ups of a prompt: see kv.md
_MONTH_DAYS = 30

Price = Annotated[float, Meta(ge=0, le=1e6)]


class Prices(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prices of a store, in dollars."""

    put: Price
    """For a million requests that write."""
    get: Price
    """For a million requests that read or look up."""
    gb_month: Price
    """For a GB that is stored for a month."""
    gb_read: Price = 0.0
    """For a GB that is read. Clouds charge it outside the bucket's region only."""


PRICES = {
    "s3": Prices(put=5, get=0.4, gb_month=0.023),
    "gcs": Prices(put=5, get=0.4, gb_month=0.020),
    "r2": Prices(put=4.5, get=0.36, gb_month=0.015),
    "folder": Prices(put=0, get=0, gb_month=0),
}
"""Examples; docs/costs.md has their dates and sources."""


class Unit(NamedTuple):
    """What is stored and loaded as a whole: a prompt's KV, or a media item's embeddings."""

    num_bytes: float
    num_objects: int
    num_look_ups: int
    compute_s: float
    """Seconds to compute it."""
    num_gpus: int = 1
    """GPUs that compute it together."""


def prompt(  # noqa: PLR0913 — the facts of a prompt
    num_tokens: int,
    token_bytes: int,
    tokens_per_s: float,
    num_gpus: int = 1,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Unit:
    """Return the KV of a prompt: its chunks, for each GPU."""
    num_objects = -(-num_tokens // chunk_tokens) * num_gpus
    num_bytes = num_tokens * token_bytes
    return Unit(num_bytes, num_objects, _HITS_LOOK_UPS, num_tokens / tokens_per_s, num_gpus)


def embedding(num_embeddings: int, embedding_bytes: int, encode_s: float) -> Unit:
    """Return the embeddings of a media item, which are one object."""
    return Unit(num_embeddings * embedding_bytes, 1, 1, encode_s)


class Dollars(Struct, frozen=True):
    """The price of each operation with a unit, once."""

    compute: float
    store: float
    """Includes `space`."""
    space: float
    """The price of the space for the time that the unit is kept."""
    look_up: float
    load: float
    """Includes `look_up`."""

    @property
    def saved(self) -> float:
        """Return how much less a load costs than computing; negative: it costs more."""
        return self.compute - self.load

    @property
    def loads_that_pay(self) -> float:
        """Return how many loads save the price of storing once; inf: no number does."""
        return self.store / self.saved if self.saved > 0 else float("inf")

    @property
    def hit_rate_that_pays(self) -> float:
        """Return the share of uses, of 1, that must be hits; inf: no share is enough."""
        lost = self.look_up + self.store
        if lost == 0 and self.saved >= 0:
            return 0.0
        return lost / (lost + self.saved) if self.saved > 0 else float("inf")


def dollars(unit: Unit, prices: Prices, hours: float, gpu_hour: float) -> Dollars:
    """Return the prices of `unit`. `hours`: how long it is kept. `gpu_hour`: dollars for a GPU."""
    gb, get = unit.num_bytes / 1e9, prices.get / 1e6
    space = gb * prices.gb_month * hours / 24 / _MONTH_DAYS
    look_up = unit.num_look_ups * get
    return Dollars(
        compute=unit.compute_s * unit.num_gpus * gpu_hour / 3600,
        store=unit.num_objects * prices.put / 1e6 + space,
        space=space,
        look_up=look_up,
        load=look_up + unit.num_objects * get + gb * prices.gb_read,
    )


class Month(Struct, frozen=True):
    """The sums of a month of traffic. A use that is not a hit is computed and stored."""

    num_puts: float
    num_gets: float
    """Includes look-ups."""
    stored_gb: float
    """What the store holds at any time, once as much expires as is stored."""
    written_gb: float
    read_gb: float
    store_dollars: float
    """The bill of the store."""
    saved_dollars: float
    """The price of computing what was loaded."""


def month(unit: Unit, once: Dollars, hours: float, uses_a_day: float, hit_rate: float) -> Month:
    """Return a month with these uses. `once`: the result of `dollars` with the same `hours`."""
    uses = uses_a_day * _MONTH_DAYS
    hits = uses * hit_rate
    misses = uses - hits
    gb = unit.num_bytes / 1e9
    return Month(
        num_puts=misses * unit.num_objects,
        num_gets=uses * unit.num_look_ups + hits * unit.num_objects,
        stored_gb=misses / _MONTH_DAYS * hours / 24 * gb,
        written_gb=misses * gb,
        read_gb=hits * gb,
        store_dollars=misses * (once.look_up + once.store) + hits * once.load,
        saved_dollars=hits * once.compute,
    )


class Times(Struct, frozen=True):
    """The times of loading and of computing."""

    compute_s: float
    load_s: float
    pays_from_bytes_per_s: float
    """The bandwidth at which both take equally long, without the latency."""
    pays_from_share: float
    """The smallest part of the unit, of 1, that loads sooner than computed; inf: no part does."""


def times(unit: Unit, bytes_per_s: float, latency_s: float) -> Times:
    """Return the times with a store of this bandwidth. `latency_s`: until the first byte."""
    transfer_s = unit.num_bytes / bytes_per_s
    gained_s = unit.compute_s - transfer_s
    return Times(
        compute_s=unit.compute_s,
        load_s=latency_s + transfer_s,
        pays_from_bytes_per_s=pays_from_bytes_per_s(unit),
        pays_from_share=latency_s / gained_s if gained_s > 0 else float("inf"),
    )


def pays_from_bytes_per_s(unit: Unit) -> float:
    """Return the bandwidth at which loading takes as long as computing."""
    return unit.num_bytes / unit.compute_s
