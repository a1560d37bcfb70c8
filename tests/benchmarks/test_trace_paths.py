# SPDX-License-Identifier: Apache-2.0
"""The paths of a save and a load are counted, and do not grow."""

import re

import pytest

from benchmarks import trace_paths

# Files, and changes of file; threads that take turns in another order make a few more.
MOST = {"save": (16, 70), "fetch": (15, 77), "KV load": (24, 117)}
LINE = re.compile(r"(.+): (\d+) calls, (\d+) files, (\d+) changes of file, .*")


def test_each_path_is_as_short_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    trace_paths.main([])
    found = {}
    for line in capsys.readouterr().out.splitlines():
        said = LINE.fullmatch(line)
        assert said is not None, line
        name, calls, files, changes = said.groups()
        assert int(calls) > int(changes) > int(files) > 5, "hardly anything was seen"
        found[name] = (int(files), int(changes))
    assert [*found] == [*MOST]
    for name, (files, changes) in found.items():
        assert files <= MOST[name][0], name
        assert changes <= MOST[name][1], name
