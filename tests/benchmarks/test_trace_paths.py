# SPDX-License-Identifier: Apache-2.0
"""The call paths of a save and a load do not grow."""

import re

import pytest

from benchmarks import trace_paths

# Files, changes of file, types of kvshare.
MOST = {"save": (12, 28, 0), "fetch": (11, 39, 0), "KV load": (23, 86, 12)}
# Another interleaving of threads causes a few more changes of file.
TRIES = 5
LINE = re.compile(r"(.+): (\d+) calls, (\d+) files, (\d+) changes of file, .* (\d+) of kvshare")


def counted(capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[int, ...]]:
    trace_paths.main([])
    found: dict[str, tuple[int, ...]] = {}
    for line in capsys.readouterr().out.splitlines():
        said = LINE.fullmatch(line)
        assert said is not None, line
        name, calls, files, changes, types = said.groups()
        assert int(calls) > int(changes) > int(files) > 5, "the trace is almost empty"
        found[name] = (int(files), int(changes), int(types))
    return found


def test_traced_paths_do_not_grow(capsys: pytest.CaptureFixture[str]) -> None:
    least = counted(capsys)
    assert [*least] == [*MOST]
    for _ in range(TRIES):
        longer = [name for name in MOST if any(map(int.__gt__, least[name], MOST[name]))]
        if not longer:
            return
        again = counted(capsys)
        least = {name: tuple(map(min, least[name], again[name])) for name in MOST}
    raise AssertionError(f"longer: {longer}; {least}")
