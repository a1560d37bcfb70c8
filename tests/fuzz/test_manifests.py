# SPDX-License-Identifier: Apache-2.0
"""Manifests by a hostile writer of the store, read by engines and the doctor.

Nothing raises, damaged ones are replaced, and no line of theirs gets into a log or a report.
"""

import asyncio
import logging
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from ecshare.doctor.contents import contents
from ecshare.store.config import StoreConfig
from ecshare.store.keys import Kind, manifest_key, namespace_digest
from ecshare.store.manifest import MAX_BYTES, list_manifests, read_manifest, write_manifest
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store
from ecshare.transfer.client.store_client import StoreClient
from ecshare.transfer.upkeep.namespaces import NamespaceWatch
from ecshare.transfer.upkeep.renewal import Record
from tests.fuzz.running import fuzzed
from tests.fuzz.values import ODD_TEXT, mutated, values, written

pytestmark = pytest.mark.fuzz

FACTS: dict[str, Any] = {
    "format": 1,
    "model": "Qwen",
    "revision": "",
    "weights": "ab",
    "dtype": "bfloat16",
    "epoch": "",
    "integrity": "",
    "layer_sets": [[1, 2, 3]],
    "hf_overrides": {"a": {"b": 1}},
}
OURS = namespace_digest(FACTS)
NAMES = [*FACTS, "tier", "x" * 3000, "\n\nERROR a line", "\x1b[2J", *ODD_TEXT]


def _odd_text(draw: DrawFn, body: bytes) -> bytes:
    """Bytes that need not be a manifest."""
    text = body.decode("utf-8", "replace")
    return draw(
        st.sampled_from(
            [
                b"",
                b"\xff" * 100,
                b"[" * 60_000,
                b'{"a":' * 12_000 + b"1" + b"}" * 12_000,
                b'{"a":' + b"9" * 60_000 + b"}",
                b'{"a":1e400}',
                b'{"a":NaN,"b":Infinity}',
                text.encode("utf-16"),
                b"\xef\xbb\xbf" + body,
                b"x" * (MAX_BYTES + 1),
                body[: len(body) // 2],
            ]
        )
    )


@st.composite
def manifests(draw: DrawFn) -> tuple[str, bytes]:
    """A namespace, and the bytes of its manifest, which are valid in half of the cases."""
    facts = draw(mutated(FACTS))
    if isinstance(facts, dict) and draw(st.booleans()):
        facts[draw(st.sampled_from(NAMES))] = draw(values)
    body = written(facts, ascii_only=draw(st.booleans()))
    try:
        namespace = namespace_digest(facts) if isinstance(facts, dict) else "0" * 32
    except (TypeError, ValueError, RecursionError):
        namespace = "1" * 32
    if draw(st.integers(0, 3)) == 3:
        body = _odd_text(draw, body)
    return namespace, body


class Heard(logging.Handler):
    """Collects the log; fails if a record has a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(record.getMessage())
        assert record.exc_info is None, record.getMessage()


@pytest.fixture(scope="module")
def heard() -> Iterator[Heard]:
    logger, handler = logging.getLogger("ecshare"), Heard()
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


def new_store() -> ObjectStore:
    return open_store(StoreConfig(url=f"memory://{uuid.uuid4().hex}/cache"), "options")


async def compare(store: ObjectStore) -> None:
    for found in await list_manifests(store, Kind.EC):
        assert namespace_digest(found.facts) == found.namespace
    await NamespaceWatch(StoreClient(store, 10), Record(Kind.EC, OURS, FACTS)).compare()


async def examine(store: ObjectStore) -> None:
    async for finding in contents(store, Kind.EC, None, 2):
        for text in (finding.text, *finding.details):
            assert text.isprintable(), repr(text)
            assert len(text) < 20_000


@fuzzed(60)
@given(st.lists(manifests(), min_size=1, max_size=3))
def test_malformed_manifests_are_ignored(
    heard: Heard, runner: asyncio.Runner, planted: list[tuple[str, bytes]]
) -> None:
    async def play() -> None:
        store = new_store()
        for namespace, body in planted:
            await store.put(manifest_key(Kind.EC, namespace), body)
        await compare(store)
        await examine(store)
        await store.close()

    heard.text.clear()
    runner.run(play())
    for text in heard.text:
        assert all(line.isprintable() for line in text.split("\n    ")), repr(text)
        assert len(text) < 20_000


@fuzzed(40)
@given(manifests())
def test_damaged_manifest_is_replaced(runner: asyncio.Runner, planted: tuple[str, bytes]) -> None:
    async def play() -> None:
        store = new_store()
        await store.put(manifest_key(Kind.EC, OURS), planted[1])
        await write_manifest(store, Kind.EC, OURS, FACTS)
        assert await read_manifest(store, Kind.EC, OURS) == FACTS
        await store.close()

    runner.run(play())
