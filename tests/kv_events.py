# SPDX-License-Identifier: Apache-2.0
"""The KV cache events of an engine, read from vLLM's publisher as by a late subscriber."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from tests.waiting import wait_until

GIVE_UP_S = 30.0
_ANSWER_MS = 20_000


@dataclass(frozen=True)
class Subscriber:
    """A subscriber to one engine, by sockets in `folder`."""

    folder: Path

    @property
    def config(self) -> dict[str, Any]:
        """The value of vLLM's `--kv-events-config`."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{self.folder}/events",
            "replay_endpoint": f"ipc://{self.folder}/replay",
        }

    @property
    def argument(self) -> str:
        return f"--kv-events-config={json.dumps(self.config)}"

    def events(self) -> list[Any]:
        """Return all events so far."""
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self.config["replay_endpoint"])
            socket.send_multipart([b"", bytes(8)])
            found: list[Any] = []
            while socket.poll(_ANSWER_MS):
                *_, payload = socket.recv_multipart()
                if not payload:
                    return found
                found += decoder.decode(payload).events
        raise AssertionError("the publisher does not answer")

    def wait(self, until: Callable[["Followed"], bool]) -> "Followed":
        """Return the state after all events so far, once `until` is true of it."""
        followed = Followed([])

        def is_so() -> bool:
            nonlocal followed
            followed = Followed(self.events())
            return until(followed)

        wait_until(is_so, pause_s=0.1)
        return followed


class Followed:
    """The state that a follower of these events has."""

    def __init__(self, events: list[Any]) -> None:
        self.of_store = [event for event in events if getattr(event, "medium", "") == "STORAGE"]
        self.computed = {
            each
            for event in events
            if isinstance(event, BlockStored) and event not in self.of_store
            for each in event.block_hashes
        }
        self.stored: set[Any] = set()
        for event in self.of_store:
            new = set(event.block_hashes)
            assert isinstance(event, BlockStored | BlockRemoved)
            if isinstance(event, BlockStored):
                assert not new & self.stored, "announced twice"
                self.stored |= new
            else:
                assert new <= self.stored, "removed, but never announced"
                self.stored -= new
