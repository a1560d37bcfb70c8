# SPDX-License-Identifier: Apache-2.0
"""docs/format.md is normative: a reader written from the page alone must agree with the code."""

import ast
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash
from blake3 import blake3

from ecshare.store.config import StoreConfig
from ecshare.store.epochs import FACT
from ecshare.store.format import ITEM_BYTES, PROLOGUE_BYTES, TensorSpec, seal
from ecshare.store.integrity import Integrity
from ecshare.store.keys import FORMAT_VERSION, Kind, namespace_digest, object_key
from ecshare.store.manifest import write_manifest
from ecshare.store.objects import probe
from ecshare.store.open import open_store
from tests.docs.pages import ROOT, fences, first_column

PAGE = ROOT / "docs" / "format.md"
NAMESPACE = "00112233445566778899aabbccddeeff"
SECRET = b"0123456789abcdef"
KEY = object_key(Kind.EC, NAMESPACE, "64::cat")


def make_sealed_object() -> bytes:
    slab = bytearray(PROLOGUE_BYTES + 24)
    slab[PROLOGUE_BYTES:] = bytes(range(24))
    attributes = {"num_embeds": 3, "metadata": {"image_grid_thw": [1, 2, 6]}}
    seal(memoryview(slab), TensorSpec("BF16", (3, 4), attributes), KEY, Integrity(SECRET))
    return bytes(slab)


def test_snippet_reads_an_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "an object"
    path.write_bytes(make_sealed_object())
    (snippet,) = fences(PAGE, "python")
    monkeypatch.setattr(sys, "argv", ["snippet", str(path)])
    exec(compile(snippet, str(PAGE), "exec"), {})  # noqa: S102 - the page's own program
    assert capsys.readouterr().out.splitlines()[1:] == [
        "torch.bfloat16 (3, 4)",
        "{'metadata': {'image_grid_thw': [1, 2, 6]}, 'num_embeds': 3}",
    ]


def test_object_has_the_documented_layout() -> None:
    body = make_sealed_object()
    assert int.from_bytes(body[:8], "little") == 4088
    assert body[:4096].rstrip(b" ").endswith(b"}")
    header = json.loads(body[8:4096])
    assert set(header) == {"__metadata__", "tensor"}
    assert header["tensor"] == {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]}
    metadata = header["__metadata__"]
    on_page = {name for name in first_column(PAGE) if name.startswith("ecshare.")}
    assert on_page == {*metadata}
    assert metadata["ecshare.format"] == "2"
    attributes, producer = metadata["ecshare.attributes"], metadata["ecshare.producer"]
    believed = [2, KEY, "BF16", [3, 4], attributes, producer]
    checksum = xxhash.xxh3_128(canonical(believed) + body[4096:]).hexdigest()
    assert metadata["ecshare.checksum"] == f"xxh3_128:{checksum}"
    assert metadata["ecshare.key"] == KEY
    own_key = blake3(SECRET, derive_key_context="ecshare 2026-11 object mac").digest()
    mac = blake3(canonical(believed) + body[4096:], key=own_key).hexdigest()
    assert metadata["ecshare.mac"] == f"blake3:{mac}"


def test_keys_have_the_documented_form() -> None:
    facts = {"model": "möwe", "epoch": "", "format": 1}
    assert namespace_digest(facts) == hashlib.sha256(canonical(facts)).hexdigest()[:32]
    text = hashlib.sha256(b"s" + b"64::cat").hexdigest()
    example = f"ec/2/{NAMESPACE}/{text[:2]}/{text}"
    assert object_key(Kind.EC, NAMESPACE, "64::cat") == example
    assert f"\n{example}\n" in PAGE.read_text()
    assert f"\n<kind>/{FORMAT_VERSION}/<namespace>/<hh>/<name>[.<part>] " in PAGE.read_text()
    assert f"\n<kind>/{FORMAT_VERSION}/manifests/<namespace> " in PAGE.read_text()
    raw = hashlib.sha256(b"b" + b"\0\xff").hexdigest()
    key = object_key(Kind.KV, NAMESPACE, b"\0\xff", "t1of2")
    assert key == f"kv/2/{NAMESPACE}/{raw[:2]}/{raw}.t1of2"


def test_page_names_every_dtype() -> None:
    assert f"`{' '.join(ITEM_BYTES)}`" in PAGE.read_text()


def test_page_names_every_fact_of_a_namespace() -> None:
    told = {name for name in first_column(PAGE) if not name.startswith("ecshare.")}
    assert told - {"ec", "kv"} == facts_of_the_code() | {FACT}


async def test_manifest_is_json_with_the_facts(tmp_path: Path) -> None:
    store = open_store(StoreConfig(url=str(tmp_path)), "options")
    facts = {"model": "möwe", "format": 1}
    namespace = namespace_digest(facts)
    await write_manifest(store, Kind.EC, namespace, facts)
    await probe(store, write=True)
    await store.close()
    assert json.loads((tmp_path / "ec" / "2" / "manifests" / namespace).read_bytes()) == facts
    assert (tmp_path / "probe" / "object").read_bytes() == b"ecshare"


def facts_of_the_code() -> set[str]:
    """Return the dictionary keys in the functions that collect facts, without running vLLM."""
    files = (
        "ecshare/plugin/model_facts",
        "ecshare/plugin/start",
        "ecshare/encoder/facts",
        "kvshare/chunks/facts",
        "kvshare/tier/facts",
    )
    trees = [ast.parse((ROOT / f"{file}.py").read_text()) for file in files]
    facts = ("model_facts", "media_facts")
    namespaces = ("encoder_namespace", "kv_namespace", "tier_namespace", "start_with_namespace")
    functions = (*namespaces, *facts)
    return {
        key.value
        for tree in trees
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in functions
        for dictionary in ast.walk(function)
        if isinstance(dictionary, ast.Dict)
        for key in dictionary.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }


def canonical(value: Any) -> bytes:
    """Return canonical JSON as the page defines it."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")
