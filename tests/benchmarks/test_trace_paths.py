# SPDX-License-Identifier: Apache-2.0
"""The call paths of a save, a load and a request through the router do not grow."""

import re
from types import ModuleType

import pytest

from benchmarks import router_paths, trace_paths

# Files, changes of file, types of kvshare.
MOST = {"save": (12, 28, 0), "fetch": (11, 39, 0), "KV load": (23, 86, 12)}
# A change of file more or less depends on when answers come.
MOST_OF_A_REQUEST = {
    "text": (24, 150, 0),
    "text, streamed": (24, 150, 0),
    "new picture": (28, 235, 0),
    "new picture, streamed": (28, 235, 0),
    "known picture": (27, 190, 0),
    "known picture, streamed": (27, 190, 0),
    "asked before": (27, 145, 0),
    "asked before, streamed": (27, 145, 0),
}
# Another interleaving of threads causes a few more changes of file.
TRIES = 5
LINE = re.compile(r"(.+): (\d+) calls, (\d+) files, (\d+) changes of file, .* (\d+) of kvshare")


def counted(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[int, ...]]:
    program.main([])
    found: dict[str, tuple[int, ...]] = {}
    for line in capsys.readouterr().out.splitlines():
        said = LINE.fullmatch(line)
        assert said is not None, line
        name, calls, files, changes, types = said.groups()
        assert int(calls) > int(changes) > int(files) > 5, "the trace is almost empty"
        found[name] = (int(files), int(changes), int(types))
    return found


@pytest.mark.parametrize(
    ("program", "most"), [(trace_paths, MOST), (router_paths, MOST_OF_A_REQUEST)]
)
def test_traced_paths_do_not_grow(
    program: ModuleType, most: dict[str, tuple[int, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    least = counted(program, capsys)
    assert [*least] == [*most]
    for _ in range(TRIES):
        longer = [name for name in most if any(map(int.__gt__, least[name], most[name]))]
        if not longer:
            return
        again = counted(program, capsys)
        least = {name: tuple(map(min, least[name], again[name])) for name in most}
    raise AssertionError(f"longer: {longer}; {least}")
