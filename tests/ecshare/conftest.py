# SPDX-License-Identifier: Apache-2.0
"""Runs the doctor, as its command does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ecshare.cli import main

Doctor = Callable[..., tuple[int, str]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Doctor:
    """Run the doctor on options; return its status and all that it printed.

    Unless the options say otherwise, the store is the folder `store`, which is there and empty.
    `argument`: what to give it instead of options.
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
