# SPDX-License-Identifier: Apache-2.0
"""Fixtures and helpers: run the doctor's command, and store objects for it to examine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ecshare.cli import main
from ecshare.store.config import StoreConfig
from ecshare.store.format import TensorSpec
from ecshare.store.keys import Key, Kind, namespace_digest
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Put
from ecshare.transfer.upkeep.renewal import Record

Doctor = Callable[..., tuple[int, str]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Doctor:
    """Run the doctor on options; return its status and all that it printed.

    Unless the options say otherwise, the store is the folder `store`, which exists and is empty.

    `argument`: the command's argument instead of options.
    """
    (tmp_path / "store").mkdir()

    def run(*arguments: str, argument: str = "", **options: Any) -> tuple[int, str]:
        here = {"url": f"{tmp_path}/store", "host_cache_dir": f"{tmp_path}/host"}
        with pytest.raises(SystemExit) as ended:
            main(["doctor", argument or json.dumps(here | options), *arguments])
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out + printed.err

    return run


def start(
    tmp_path: Path,
    facts: dict[str, Any],
    url: str = "",
    *keys: Key,
    kind: Kind = Kind.EC,
    **options: Any,
) -> None:
    """Store objects under `keys`, as an engine with these facts."""
    config = StoreConfig(
        url=url or f"{tmp_path}/store", host_cache_dir=f"{tmp_path}/other", **options
    )
    engine = TransferEngine(config, "options")
    engine.start_up(Record(kind, namespace_digest(facts), facts), write=True)
    staging = Staging(torch.device("cpu"), 1 << 20)
    for key in keys:
        slab = staging.reserve(TensorSpec("U8", (1000,), {}))
        assert slab is not None
        slab.payload.zero_()
        engine.submit(Put(key, slab))
        engine.drain(10)
    engine.close()
