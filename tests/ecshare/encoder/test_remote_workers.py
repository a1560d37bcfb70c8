# SPDX-License-Identifier: Apache-2.0
"""One engine on two hosts: the scheduler half and the first rank on one, the other rank on another.

vLLM takes a promise of the scheduler half for all ranks; one that cannot keep it ends the engine.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ECTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from ecshare.encoder.config import EncoderConfig
from ecshare.encoder.scheduler.scheduler import EncoderScheduler
from ecshare.encoder.worker import EncoderWorker
from ecshare.plugin.deployment import has_remote_workers
from ecshare.plugin.ranks import Rank
from tests.ecshare.encoder.scheduler.test_scheduler import NUM_EMBEDS, feature, request, until_ready
from tests.waiting import wait_until


class Hosts:
    """The halves of one `ec_both` engine, and the steps of a request for one image."""

    def __init__(self, vllm_config: VllmConfig, folder: Path) -> None:
        self.store = folder / "store"
        width = vllm_config.model_config.get_hidden_size()
        self._embedding = torch.randn(NUM_EMBEDS, width)
        seen: Any = SimpleNamespace(
            ec_transfer_config=SimpleNamespace(
                is_ec_producer=True, is_ec_consumer=True, engine_id="engine"
            ),
            device_config=SimpleNamespace(device="cpu"),
            parallel_config=SimpleNamespace(data_parallel_index=0),
        )
        here, there = (
            EncoderConfig(url=str(self.store), host_cache_dir=f"{folder}/{host}")
            for host in ("here", "there")
        )
        self.scheduler = EncoderScheduler.start(vllm_config, here)
        self.ranks = [
            EncoderWorker.start(seen, here, Rank(0, 2)),
            EncoderWorker.start(seen, there, Rank(1, 2)),
        ]

    def ask(self, name: str) -> tuple[bool, list[bool]]:
        """Serve a request; return if the image was promised, and which ranks had it."""
        asked = request(feature(), name=name, ec_transfer_params=None, lora_request=None)
        assert until_ready(self.scheduler, asked)
        is_promised = self.scheduler.has("picture")
        self.scheduler.allocated(asked, 0)
        orders = self.scheduler.orders({name: NUM_EMBEDS})
        had = []
        for rank in self.ranks:
            cache: dict[str, torch.Tensor] = {}
            rank.begin_saves(orders, cache)
            rank.load(orders, cache)
            if not is_promised:
                cache["picture"] = self._embedding
                rank.save("picture", cache)
            rank.settle()
            had.append("picture" in cache)
            self.scheduler.reported(rank.report())
        self.scheduler.finished(asked)
        return is_promised, had

    def objects(self) -> list[Path]:
        return [path for path in (self.store / "ec").rglob("*") if len(path.name) == 64]

    def until_stored(self) -> None:
        wait_until(self.objects)

    def close(self) -> None:
        self.scheduler.close()
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def hosts(vlm: Path, tmp_path: Path) -> Iterator[Hosts]:
    args = EngineArgs(model=str(vlm), dtype="float32", enforce_eager=True)
    vllm_config = args.create_engine_config()
    vllm_config.ec_transfer_config = ECTransferConfig(
        ec_connector="ECShareConnector", ec_role="ec_both"
    )
    vllm_config.parallel_config.nnodes = 2
    started = Hosts(vllm_config, tmp_path)
    yield started
    started.close()


def test_item_missing_in_the_store_is_not_promised_to_remote_ranks(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    """For example its save failed: then it is in this host's cache alone."""
    said = [record.getMessage() for record in caplog.get_records("setup")]
    assert len([line for line in said if "Workers may be on other hosts" in line]) == 1
    assert hosts.ask("first") == (False, [True, True])
    hosts.until_stored()
    for path in hosts.objects():
        path.unlink()
    assert hosts.ask("second") == (False, [True, True])
    hosts.until_stored()
    assert hosts.ask("third") == (True, [True, True])


@pytest.mark.parametrize(
    ("executor", "nnodes", "is_remote"),
    [
        ("uni", 1, False),
        ("mp", 1, False),
        ("external_launcher", 1, False),
        ("mp", 2, True),
        ("ray", 1, True),
        ("some.package.Executor", 1, True),
        (object, 1, True),
    ],
)
def test_workers_count_as_remote_unless_known_to_be_local(
    executor: Any, nnodes: int, *, is_remote: bool
) -> None:
    parallel = SimpleNamespace(distributed_executor_backend=executor, nnodes=nnodes)
    assert has_remote_workers(SimpleNamespace(parallel_config=parallel)) is is_remote
