# SPDX-License-Identifier: Apache-2.0
"""The paths of a save and a load are counted, and do not grow."""

import re

import pytest

from benchmarks import trace_paths

# Files, changes of file, types of kvshare. Threads that take turns in another order make a few more
# changes.
MOST = {"save": (12, 30, 0), "fetch": (11, 38, 0), "KV load": (22, 80, 12)}
LINE = re.compile(r"(.+): (\d+) calls, (\d+) files, (\d+) changes of file, .* (\d+) of kvshare")


def test_each_path_is_as_short_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    trace_paths.main([])
    found = {}
    for line in capsys.readouterr().out.splitlines():
        said = LINE.fullmatch(line)
        assert said is not None, line
        name, calls, files, changes, types = said.groups()
        assert int(calls) > int(changes) > int(files) > 5, "hardly anything was seen"
        found[name] = (int(files), int(changes), int(types))
    assert [*found] == [*MOST]
    for name, counts in found.items():
        assert all(count <= most for count, most in zip(counts, MOST[name], strict=True)), name
