# SPDX-License-Identifier: Apache-2.0
"""Strategies: unusual JSON values, and valid ones with one to three places changed."""

import copy
import json
from typing import Any

from hypothesis import strategies as st

Path = tuple[str | int, ...]

ODD_NUMBERS: list[int | float] = [
    *(0, -1, 1, 2, 7, 2**31 - 1, 2**31, 2**32, 2**48 - 1, 2**48, 2**53, 2**63 - 1, 2**63, 2**64),
    *(2**128, -(2**63), -(2**64), 10**30, 1.0, 0.5, -0.0, 1e308, 5e-324),
    *(float("inf"), float("-inf"), float("nan")),
]
ODD_TEXT = [
    *("", " ", "\x00", "a\x00b", "\ud800", "\udcff", "\u00e9", "\u202e", "\U0001f4a5", "\x1b[31m"),
    *("../../etc/passwd", "..", "/", "/etc/passwd", "a" * 5000, "-1", "0", "NaN", "null", "{}"),
    *("%00", "%2e%2e", "\r\nX: y", "\n\nERROR a line", "data:", "file:///etc/passwd", "http://["),
    *("blake3:" + "0" * 64, "xxh3_128:" + "0" * 32, "blake3:", "xxh3_128:", "BF16", "U8", "\u0661"),
]


def _nested(depth: int, is_list: bool, core: Any) -> Any:
    for _ in range(depth):
        core = [core] if is_list else {"a": core}
    return core


odd_text = st.sampled_from(ODD_TEXT) | st.text(max_size=8)
scalars = st.none() | st.booleans() | st.sampled_from(ODD_NUMBERS) | st.integers(0, 1000) | odd_text
deep = st.builds(_nested, st.sampled_from([5, 50, 400]), st.booleans(), scalars)
values = st.one_of(
    scalars,
    scalars,
    st.lists(scalars, max_size=4),
    st.dictionaries(odd_text, scalars, max_size=4),
    st.sampled_from([[], {}, [[]], {"a": {}}]).map(copy.deepcopy),
    deep,
)


def paths(value: Any, at: Path = ()) -> list[Path]:
    """The path of every value inside `value`."""
    inner: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    found: list[Path] = []
    for name, each in inner:
        found += [(*at, name), *paths(each, (*at, name))]
    return found


@st.composite
def mutated(draw: st.DrawFn, base: Any) -> Any:
    """Return a copy of `base`, a JSON value, with one to three places changed; or anything."""
    if draw(st.integers(0, 49)) == 49:
        return draw(values)
    value = copy.deepcopy(base)
    for _ in range(draw(st.integers(1, 3))):
        places = paths(value)
        if not places:
            break
        _change(draw, value, draw(st.sampled_from(places)))
    return value


def _change(draw: st.DrawFn, value: Any, at: Path) -> None:
    parent: Any = value
    last: Any = at[-1]
    for name in at[:-1]:
        parent = parent[name]
    match draw(st.sampled_from(["replace", "replace", "drop", "add", "repeat"])):
        case "replace":
            parent[last] = draw(values)
        case "drop":
            del parent[last]
        case "add" if isinstance(parent, dict):
            parent[draw(odd_text | st.sampled_from(sorted(map(str, parent))))] = draw(values)
        case "add":
            parent.insert(draw(st.integers(0, len(parent))), draw(values))
        case _ if isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))


def written(value: Any, *, ascii_only: bool = True) -> bytes:
    """Return `value` as JSON text, lone surrogates, NaN and all."""
    return json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
