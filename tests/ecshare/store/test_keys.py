# SPDX-License-Identifier: Apache-2.0
import hashlib
import pickle
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecshare.store.keys import (
    PROBE_KEY,
    Key,
    Kind,
    canonical_json,
    is_object_key,
    is_safe_key,
    manifest_key,
    namespace_digest,
    object_key,
    tp_size_key,
)

NAMESPACE = "0123456789abcdef" * 2
KEY = object_key(Kind.EC, NAMESPACE, "a")
SHAPE = re.compile(r"(ec|kv)/2/[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{64}(\.[a-z0-9_-]{1,32})?")

OUTSIDE = (
    "",
    ".",
    "..",
    "../evil",
    "a/../../evil",
    "/etc/passwd",
    "a//b",
    "a/",
    ".hidden",
    "a/.hidden",
    "a\0b",
    "a\n",
    "a\\b",
    "a?b",
    "a#b",
    "a%2e%2e",
    "ä",
    "x" * 300,
)


def test_layout_of_keys_is_fixed() -> None:
    """A change of this layout needs a new format version."""
    digest = hashlib.sha256(b"scat.png").hexdigest()
    assert object_key(Kind.EC, NAMESPACE, "cat.png") == f"ec/2/{NAMESPACE}/{digest[:2]}/{digest}"
    digest = hashlib.sha256(b"b\x00\x01").hexdigest()
    assert (
        object_key(Kind.KV, NAMESPACE, b"\x00\x01", "r0")
        == f"kv/2/{NAMESPACE}/{digest[:2]}/{digest}.r0"
    )
    assert manifest_key(Kind.EC, NAMESPACE) == f"ec/2/manifests/{NAMESPACE}"
    assert tp_size_key(Kind.KV, NAMESPACE, 8) == f"kv/2/sizes/{NAMESPACE}/8"
    assert (
        namespace_digest({"b": [1], "a": None})
        == (hashlib.sha256(b'{"a":null,"b":[1]}').hexdigest()[:32])
    )


@given(st.one_of(st.text(), st.binary()))
def test_object_key_has_the_same_shape_for_any_name(name: str | bytes) -> None:
    key = object_key(Kind.EC, NAMESPACE, name)
    assert SHAPE.fullmatch(key)
    assert is_object_key(key)
    assert is_safe_key(key)


@pytest.mark.parametrize(
    "name", ["../../evil/x", "/etc/passwd", "a\0b", "\ud800", "x" * 100_000, ""]
)
def test_hostile_name_does_not_appear_in_the_key(name: str) -> None:
    assert SHAPE.fullmatch(object_key(Kind.EC, NAMESPACE, name))


def test_name_part_kind_and_namespace_change_the_key() -> None:
    keys = {
        object_key(Kind.EC, NAMESPACE, "a"),
        object_key(Kind.EC, NAMESPACE, b"a"),
        object_key(Kind.EC, NAMESPACE, "a", "r0"),
        object_key(Kind.EC, NAMESPACE, "a", "r1"),
        object_key(Kind.KV, NAMESPACE, "a"),
        object_key(Kind.EC, "f" * 32, "a"),
    }
    assert len(keys) == 6


@pytest.mark.parametrize("part", ["../x", "R0", "x" * 33, "a/b", "a.b", "a\n"])
def test_malformed_part_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match="part"):
        object_key(Kind.EC, NAMESPACE, "a", part)


@pytest.mark.parametrize(
    "namespace", ["", "x" * 32, "F" * 32, "0" * 31, "../" * 8, "0" * 32 + "\n"]
)
def test_malformed_namespace_is_refused(namespace: str) -> None:
    with pytest.raises(ValueError, match="namespace"):
        object_key(Kind.EC, namespace, "a")
    with pytest.raises(ValueError, match="namespace"):
        manifest_key(Kind.EC, namespace)


@pytest.mark.parametrize(
    "key",
    [
        manifest_key(Kind.EC, NAMESPACE),
        PROBE_KEY,
        object_key(Kind.EC, NAMESPACE, "a") + "\n",
        object_key(Kind.EC, NAMESPACE, "a").replace("ec/2", "ec/1"),
        f"ec/2/{NAMESPACE}/00/{'f' * 64}",
    ],
)
def test_other_keys_are_not_object_keys(key: str) -> None:
    assert not is_object_key(key)


def test_own_keys_are_valid_keys() -> None:
    for key in (
        PROBE_KEY,
        manifest_key(Kind.KV, NAMESPACE),
        object_key(Kind.KV, NAMESPACE, "", "p"),
    ):
        assert Key(key) is key
        assert type(pickle.loads(pickle.dumps(key))) is Key  # noqa: S301


@pytest.mark.parametrize("text", OUTSIDE)
def test_unsafe_text_is_not_a_key(text: str) -> None:
    with pytest.raises(ValueError, match="not a key"):
        Key(text)


@given(st.text())
def test_safe_key_stays_below_its_root(key: str) -> None:
    if is_safe_key(key):
        assert not key.startswith("/")
        assert all(level and not level.startswith(".") for level in key.split("/"))
        assert key.isascii()
        assert key.isprintable()


def test_canonical_json_is_sorted_compact_ascii() -> None:
    assert canonical_json({"b": (1, 2), "a": "ä\ud800"}) == b'{"a":"\\u00e4\\ud800","b":[1,2]}'


@pytest.mark.parametrize("value", [{1: 2}, [{None: 1}], {"a": float("nan")}, {"a": object()}])
def test_values_that_json_would_change_are_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        canonical_json(value)


def test_keys_are_the_same_in_another_process() -> None:
    script = (
        "from ecshare.store.keys import *; "
        f"print(object_key(Kind.EC, {NAMESPACE!r}, 'a'), namespace_digest({{'b': 1, 'a': 2}}))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [
        object_key(Kind.EC, NAMESPACE, "a"),
        namespace_digest({"a": 2, "b": 1}),
    ]
