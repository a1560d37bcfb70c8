# SPDX-License-Identifier: Apache-2.0
"""The doctor among hostile manifests, odd keys, endless listings and arguments of any kind."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from ecshare.doctor import contents
from ecshare.doctor.contents import count_objects
from ecshare.store import manifest
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.keys import Kind, manifest_key, manifests_prefix, namespace_digest, object_key
from ecshare.store.manifest import Manifest, nearest
from ecshare.store.objects import ObjectInfo
from tests.ecshare.conftest import Doctor, start

FACTS = {"model": "qwen", "weights": "aa", "dtype": "bfloat16", "epoch": "", "integrity": ""}
NAMESPACE = namespace_digest(FACTS)
HIDDEN = "S3CRETVALUE"
KEY = "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2"


# --- hostile content of the store ---


def hostile(n: int) -> dict[str, Any]:
    """Make a manifest with as many facts as are compared at most."""
    return {f"n{m:03d}": "v" * 110 for m in range(499)} | {"n": n}


def test_many_large_manifests_are_compared_in_linear_time(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store" / manifests_prefix(Kind.EC)
    folder.mkdir(parents=True)
    for n in range(manifest.MOST_READ):
        (folder / namespace_digest(hostile(n))).write_text(json.dumps(hostile(n)))
    num_texts, text = 0, manifest._text

    def counted(value: Any) -> str:
        nonlocal num_texts
        num_texts += 1
        return text(value)

    monkeypatch.setattr(manifest, "_text", counted)
    status, said = doctor("--read-only")
    assert status == 0
    # A few texts a fact; comparing all pairs would make millions.
    assert num_texts < 10 * manifest.MOST_READ * 500
    assert said.count("share nothing, because of:") == contents.MAX_SHOWN
    assert "more pairs of namespaces share nothing" in said


def test_number_of_shown_differences_is_bounded(doctor: Doctor, tmp_path: Path) -> None:
    for facts in ({f"a{n}": n for n in range(300)}, {f"b{n}": n for n in range(300)}):
        start(tmp_path, facts)
    lines = doctor("--read-only")[1].splitlines()
    shown = [line for line in lines if "(none)" in line]
    assert len(shown) == contents.MAX_SHOWN
    assert any(line.strip() == "and 580 more" for line in lines)


def test_nearest_manifest_has_the_fewest_differing_facts() -> None:
    ours = {"a": 1, "b": {"c": 1, "d": 2}, "e": []}

    def made(name: str, facts: dict[str, Any]) -> Manifest:
        return Manifest(name, facts)

    same = made("same", dict(ours))
    one = made("one", ours | {"b": {"c": 1, "d": 3}})
    two = made("two", ours | {"b": {"c": 2, "d": 3}})
    other = made("tier", ours | {"tier": 1})
    assert nearest(ours, [same, two, one, other]) is one
    assert nearest(ours, [same, two]) is two
    assert nearest(ours, [same, other]) is None
    # A flat name that equals the path of a nested one.
    assert nearest({"a": {"b": 1}}, [made("", {"a.b": 1})]) is not None
    assert nearest({"a": 1}, [made("", {"a": True})]) is not None


@pytest.mark.parametrize("modified_s", [None, 0.0, 1e300, -1e300, float("nan")])
def test_manifest_without_a_valid_time_is_shown(modified_s: float | None) -> None:
    finding = contents._namespace_finding(
        Kind.EC, Manifest(NAMESPACE, FACTS, modified_s), contents.NamespaceCount(), ""
    )
    assert "its manifest is " in finding.text


async def test_counting_objects_stops_after_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow client needs many minutes to list a million objects."""
    key = object_key(Kind.EC, NAMESPACE, "x")
    seconds: Iterator[float] = iter([0.0, 1.0, 2.0, contents.MAX_COUNT_S + 1])
    closed = False

    class Slow(DirectoryStore):
        async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
            del prefix
            try:
                while True:
                    yield ObjectInfo(key, 1, 0.0)
            finally:
                nonlocal closed
                closed = True

    found, num_counted = await count_objects(Slow("/nowhere"), "ec/2/", 1, lambda: next(seconds))
    assert (found[NAMESPACE].num_objects, num_counted) == (2, 2)
    assert closed


def test_unlisted_manifest_is_checked_by_its_key(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing may leave a manifest out, for example because of an invalid key beside it."""
    start(tmp_path, FACTS, "", object_key(Kind.EC, NAMESPACE, "picture"))
    listing = DirectoryStore.list

    async def without(store: DirectoryStore, prefix: str) -> AsyncIterator[ObjectInfo]:
        async for info in listing(store, prefix):
            if info.key != manifest_key(Kind.EC, NAMESPACE):
                yield info

    monkeypatch.setattr(DirectoryStore, "list", without)
    text = doctor("--read-only")[1]
    assert f"{NAMESPACE}: 1 objects, 5,096 B; its manifest is not listed" in text
    assert "without a manifest" not in text


# --- hostile arguments ---


def test_doctor_notes_a_literal_secret(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    status, text = doctor("--read-only", integrity_key=KEY)
    assert status == 0
    assert "note    options: options.integrity_key: a secret is written into the" in text
    assert "write env:NAME or file:/path" in text
    assert KEY not in text
    reference = f"file:{tmp_path}/key"
    assert "note    options" not in doctor("--read-only", integrity_key=reference)[1]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ('{"url": "/x", "storage_options": ' + '{"a":' * 600 + "1" + "}" * 601, "nested more than"),
        ("[" * 100_000, "options.url: "),
        ('{"url": "/x", "storage_options": {"a": "\\ud800"}}', "surrogates not allowed"),
        ("\udcff", "options.url: contains a lone surrogate"),
        ("@\udcff", "argument store: "),
        ('x"url": "s3://bucket"}', "neither a url nor a JSON object"),
        (
            '{"url": "s3://buck/x", "storage_options": {"endpoint_url": "http://[", "anon": true}}',
            "no endpoint",
        ),
        ('{"a\\nb": 1}', "options: 'a\\nb' is not a name of an option"),
        (
            '{"url": "s3://bucket/x", "storage_options": {"s3_additional_kwargs": {}, '
            '"key": "k", "secret": "s", "config_kwargs": 3}}',
            "options.storage_options.config_kwargs: expected an object, got int",
        ),
    ],
)
def test_hostile_argument_is_refused_in_one_sentence(
    doctor: Doctor, argument: str, words: str
) -> None:
    status, text = doctor(argument=argument)
    assert status == 2
    assert words in text.splitlines()[-1]
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no certificate", "no certificates can be read from"),
        (
            b"-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n",
            "obstore cannot use them",
        ),
        (None, "no certificates can be read"),
    ],
)
def test_unusable_certificates_are_named(
    doctor: Doctor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    words: str,
) -> None:
    if content is not None:
        (tmp_path / "ca.pem").write_bytes(content)
    monkeypatch.setenv("AWS_CA_BUNDLE", f"{tmp_path}/ca.pem")
    options = {"key": "k", "secret": HIDDEN, "endpoint_url": "https://127.0.0.1:9"}
    status, text = doctor(url="s3://bucket/x", storage_options=options)
    assert status == 2
    assert words in text.splitlines()[-1]
    assert HIDDEN not in text
