# SPDX-License-Identifier: Apache-2.0
"""Clients of a stack: some that wait for their answers, or as many as arrive at a rate."""

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lab.servers.openai_client import RequestFailed, ask, stream

Body = Mapping[str, Any]
MOST_AT_ONCE = 128


@dataclass(frozen=True)
class Reply:
    """The answer to one request; its times are seconds since it was sent."""

    tokens: tuple[int, ...] | None
    """None: the request was lost."""
    first_s: float
    """Until the first event with a token, or until the whole answer if it is not streamed."""
    took_s: float


def by_clients(url: str, bodies: Sequence[Body], clients: int, *, streams: bool) -> list[Reply]:
    """Have `clients` clients send one request after the other; return the replies in order."""
    with ThreadPoolExecutor(clients) as threads:
        return list(threads.map(lambda body: ask_once(url, body, streams=streams), bodies))


def arriving(url: str, bodies: Sequence[Body], per_s: float, seed: int) -> list[Reply]:
    """Send requests as they arrive, `per_s` a second on average, without waiting for answers.

    The time between two arrivals is exponentially distributed; a seed gives the same times again.
    """
    times = random.Random(seed)
    at_s, began_s = 0.0, time.perf_counter()
    asked: list[Future[Reply]] = []
    with ThreadPoolExecutor(MOST_AT_ONCE) as threads:
        for body in bodies:
            at_s += times.expovariate(per_s)
            time.sleep(max(0.0, began_s + at_s - time.perf_counter()))
            asked.append(threads.submit(ask_once, url, body, streams=True))
        return [each.result() for each in asked]


def ask_once(url: str, body: Body, *, streams: bool) -> Reply:
    """Send one request and return the reply."""
    began_s = time.perf_counter()
    tokens: list[int] = []
    first_s = 0.0
    try:
        if not streams:
            tokens += ask(url, dict(body)).token_ids
        else:
            for event in stream(url, dict(body)):
                if "error" in event:
                    return Reply(None, 0.0, 0.0)
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or ()
                if tokens and not first_s:
                    first_s = time.perf_counter() - began_s
    except RequestFailed:
        return Reply(None, 0.0, 0.0)
    took_s = time.perf_counter() - began_s
    return Reply(tuple(tokens), first_s or took_s, took_s)
