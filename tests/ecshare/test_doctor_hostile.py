# SPDX-License-Identifier: Apache-2.0
"""The doctor among hostile manifests, odd keys, endless listings and arguments of any kind."""

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from ecshare.doctor import contents
from ecshare.doctor.contents import tally
from ecshare.doctor.examine import _open
from ecshare.doctor.options import read_argument
from ecshare.store import manifest
from ecshare.store.config import StoreConfig
from ecshare.store.directory import Directory
from ecshare.store.errors import ConfigError
from ecshare.store.keys import Kind, manifest_key, manifests_prefix, namespace_digest, object_key
from ecshare.store.manifest import Manifest, nearest
from ecshare.store.objects import ObjectInfo
from tests.ecshare.conftest import Doctor, start

FACTS = {"model": "qwen", "weights": "aa", "dtype": "bfloat16", "epoch": "", "integrity": ""}
NAMESPACE = namespace_digest(FACTS)
HIDDEN = "S3CRETVALUE"


# --- what lies in the store ---


def hostile(n: int) -> dict[str, Any]:
    """As many facts as are compared."""
    return {f"n{m:03d}": "v" * 110 for m in range(499)} | {"n": n}


def test_many_large_manifests_cost_little(
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
    # A few of each fact; pair by pair it would be millions.
    assert num_texts < 10 * manifest.MOST_READ * 500
    assert said.count("share nothing, because of:") == contents._MOST_NAMED
    assert "more pairs of namespaces share nothing" in said


def test_differences_are_shown_up_to_a_limit(doctor: Doctor, tmp_path: Path) -> None:
    for facts in ({f"a{n}": n for n in range(300)}, {f"b{n}": n for n in range(300)}):
        start(tmp_path, facts)
    lines = doctor("--read-only")[1].splitlines()
    shown = [line for line in lines if "(none)" in line]
    assert len(shown) == contents._MOST_NAMED
    assert any(line.strip() == "and 580 more" for line in lines)


def test_the_nearest_differs_in_the_fewest_facts_at_any_depth() -> None:
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
    # One level that is called as two others are.
    assert nearest({"a": {"b": 1}}, [made("", {"a.b": 1})]) is not None
    assert nearest({"a": 1}, [made("", {"a": True})]) is not None


@pytest.mark.parametrize("modified_s", [None, 0.0, 1e300, -1e300, float("nan")])
def test_a_manifest_of_no_known_time_is_shown(modified_s: float | None) -> None:
    finding = contents._held(Kind.EC, Manifest(NAMESPACE, FACTS, modified_s), contents.Count(), "")
    assert "its manifest is " in finding.text


async def test_counting_stops_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow road lists a million objects in many minutes."""
    key = object_key(Kind.EC, NAMESPACE, "x")
    seconds: Iterator[float] = iter([0.0, 1.0, 2.0, contents._LONGEST_COUNT_S + 1])
    closed = False

    class Slow(Directory):
        async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
            del prefix
            try:
                while True:
                    yield ObjectInfo(key, 1, 0.0)
            finally:
                nonlocal closed
                closed = True

    found, num_counted = await tally(Slow("/nowhere", 1.0), "ec/1/", 1, lambda: next(seconds))
    assert (found[NAMESPACE].num_objects, num_counted) == (2, 2)
    assert closed


def test_a_namespace_that_no_listing_told_is_asked_for_by_name(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an odd key lies beside its manifest."""
    start(tmp_path, FACTS, "", object_key(Kind.EC, NAMESPACE, "picture"))
    listing = Directory.list

    async def without(store: Directory, prefix: str) -> AsyncIterator[ObjectInfo]:
        async for info in listing(store, prefix):
            if info.key != manifest_key(Kind.EC, NAMESPACE):
                yield info

    monkeypatch.setattr(Directory, "list", without)
    text = doctor("--read-only")[1]
    assert f"{NAMESPACE}: 1 objects, 0.0 MB; its manifest is not listed" in text
    assert "without a manifest" not in text


# --- what it is given ---


def test_a_literal_secret_is_noted(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("0123456789abcdef" * 4)
    (tmp_path / "key").chmod(0o600)
    status, text = doctor("--read-only", integrity_key=HIDDEN * 4)
    assert status == 0
    assert "note    options: options.integrity_key: a secret is written into the" in text
    assert "write env:ECSHARE_INTEGRITY_KEY, or file:/path" in text
    assert HIDDEN not in text
    reference = f"file:{tmp_path}/key"
    assert "note    options" not in doctor("--read-only", integrity_key=reference)[1]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ('{"url": "/x", "storage_options": ' + '{"a":' * 600 + "1" + "}" * 601, "nested more than"),
        ("[" * 100_000, "options.url: "),
        ('{"url": "/x", "storage_options": {"a": "\\ud800"}}', "surrogates not allowed"),
        ("\udcff", "options.url: holds half of a character"),
        ("@\udcff", "argument store: "),
        ('x"url": "s3://bucket"}', "neither a url nor a JSON object"),
        (
            '{"url": "s3://buck/x", "storage_options": {"endpoint_url": "http://[", "anon": true}}',
            "no endpoint",
        ),
        ('{"a\\nb": 1}', "options.a\\nb: unknown option"),
        (
            '{"url": "s3://bucket/x", "storage_options": {"s3_additional_kwargs": {}, '
            '"key": "k", "secret": "s", "config_kwargs": 3}}',
            "options.storage_options.config_kwargs: expected an object of options",
        ),
    ],
)
def test_what_makes_no_sense_is_one_sentence(doctor: Doctor, argument: str, words: str) -> None:
    status, text = doctor(argument=argument)
    assert status == 2
    assert words in text.splitlines()[-1]
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no certificate", "holds no certificate in PEM"),
        (
            b"-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n",
            "obstore cannot use them",
        ),
        (None, "no certificates can be read"),
    ],
)
def test_certificates_that_are_none_are_named(
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


# --- at random ---

ODD: list[Any] = [
    *("", "\x00", "\ud800", "é", "..", "/", "-1", "NaN", "\r\nX: y", "\x1b[31m", "x" * 5000),
    *("env:OURS", "env:", "env:\x00", "file:", "file:/nonexistent", "file:{here}", "{", "[" * 3000),
    *("http://[", "http://host:99999999", f"http://me:{HIDDEN}@h"),
    *(0, -1, 1 << 70, 0.5, 1e308, float("nan"), True, None),
]
URLS = [
    *("s3://bucket/x", "s3://", "s3://a", "s3://bucket//x", "s3://bucket/..", "S3://bucket"),
    *("file://", "file://host/x", "::", "zip://x::s3://b", "relative", "~", "memory://x"),
    *("az://container/x", "abfs://@x", "abfs://c@abcd.dfs.core.windows.net/p", "gs://bucket/p"),
    *("gs://é", "http://[", "sftp://[", "ftp://a:b:c/", "reference://x", "git://x", "hf://x"),
    *(f"s3://AK:{HIDDEN}@bucket/p", f"s3://AK:{HIDDEN}[bucket/p", f"ftp://u:{HIDDEN}x1:1/x"),
]
STORAGE_OPTIONS: dict[str, Any] = {
    "key": "AK",
    "secret": HIDDEN,
    "token": HIDDEN,
    "endpoint_url": "http://127.0.0.1:9",
    "client_kwargs": {"region_name": "x", "verify": False, "headers": {"Cookie": HIDDEN}},
    "config_kwargs": {"s3": {"addressing_style": "path"}, "signature_version": "s3v4"},
    "s3_additional_kwargs": {},
    "account_name": "abcd",
    "account_key": "QUJD",
    "connection_string": f"AccountName=abcd;AccountKey={HIDDEN}",
    "sas_token": f"?sig={HIDDEN}",
    "credential": HIDDEN,
    "anon": True,
}


def some_argument(rng: random.Random, here: Path) -> str:
    """An argument of the command line that is nearly right."""
    names = rng.sample([*STORAGE_OPTIONS], rng.randrange(5))
    options = {
        "url": rng.choice(URLS),
        "storage_options": json.loads(json.dumps({name: STORAGE_OPTIONS[name] for name in names})),
        "integrity_key": HIDDEN * 3,
        "wait_s": 1,
    }
    for _ in range(rng.randrange(3)):
        spoil(rng, options, here)
    said: Any = options
    if rng.random() < 0.2:
        said = {"kv_connector": "KVShareConnector", "kv_connector_extra_config": options}
    text = json.dumps(said, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.1:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["\x00", "{", "]", '"', "\ud800", "1e999"]) + text[at + 1 :]
    return rng.choice(URLS) if rng.random() < 0.05 else text


def spoil(rng: random.Random, value: Any, here: Path) -> None:
    """Change one place in `value`, or below."""
    name = rng.choice([*value]) if value else "x"
    if isinstance(value.get(name), dict) and rng.random() < 0.8:
        spoil(rng, value[name], here)
        return
    odd = rng.choice(ODD)
    odd = odd.replace("{here}", str(here)) if isinstance(odd, str) else odd
    what = rng.randrange(4)
    if what == 0 and odd and HIDDEN not in str(odd):
        value[str(odd)] = 1
    elif what == 1:
        value[name] = rng.choice([[odd], {"x": odd}, [], {}])
    else:
        value[name] = odd


async def opened(text: str) -> Iterator[str]:
    """Do what the doctor does before it asks a store; return what it could show."""
    subjects, strangers = read_argument(text)
    shown = [str(stranger) for stranger in strangers]
    for each in _open(subjects):
        config: StoreConfig = each.subject.config
        shown += [repr(config), str(config.for_log()), *config.warnings("options")]
        if each.store is not None:
            await each.store.close()
    return iter(shown)


@pytest.mark.parametrize("seed", range(int(os.environ.get("ECSHARE_FUZZ_SEEDS", "3"))))
def test_arguments_at_random_are_taken_or_one_sentence(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no secret is shown, neither way."""
    monkeypatch.setenv("OURS", HIDDEN)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.chdir(tmp_path)
    rng = random.Random(seed)
    num_taken = 0
    for _ in range(300):
        text = some_argument(rng, tmp_path)
        try:
            shown = [*asyncio.run(opened(text))]
        except ConfigError as exc:
            shown = [str(exc)]
            "".join(shown).encode()
            num_lines = str(exc).count("\n") + 1
        else:
            num_lines = 1
            num_taken += 1
        assert num_lines == 1, text
        assert not [said for said in shown if HIDDEN in said], text
    assert num_taken > 3
    assert not [*tmp_path.iterdir()], "nothing is made on the way"
