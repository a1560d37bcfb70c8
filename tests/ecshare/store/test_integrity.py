# SPDX-License-Identifier: Apache-2.0
import base64
from pathlib import Path
from typing import Any

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError, ObjectCorrupt, ObjectForeign
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal, unseal
from ecshare.store.integrity import Integrity, open_integrity
from ecshare.store.keys import Kind, object_key

SECRET = "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2"
OLD = "0b7d52a1f7e94c3c8f25c2f4d3f1a8e96b0c7d1e2f3a4b5c6d7e8f9012345678"
OURS = Integrity(SECRET.encode())
OTHERS = Integrity(b"fedcba9876543210")
KEY = object_key(Kind.EC, "0" * 32, "an object")
FACTS = TensorSpec("U8", (3, 4), {"num_embeds": 3})


def opened(key: str, **options: Any) -> Integrity | None:
    return open_integrity(StoreConfig(url="/x", integrity_key=key, **options), "options")


def sealed(integrity: Integrity | None) -> bytearray:
    slab = bytearray(PROLOGUE_BYTES + 12)
    seal(memoryview(slab), FACTS, KEY, integrity)
    return slab


def test_object_is_read_with_the_key_it_was_written_with() -> None:
    assert unseal(memoryview(sealed(OURS)), KEY, integrity=OURS).spec == FACTS


def test_reader_without_a_key_reads_a_signed_object() -> None:
    assert unseal(memoryview(sealed(OURS)), KEY).spec == FACTS


@pytest.mark.parametrize("writer", [None, OTHERS])
def test_object_without_the_right_mac_is_refused(writer: Integrity | None) -> None:
    with pytest.raises(ObjectCorrupt, match="MAC"):
        unseal(memoryview(sealed(writer)), KEY, integrity=OURS)


@pytest.mark.parametrize("mac", [b"", "ä".encode(), b"blake3:", b"blake3:" + b"0" * 64])
def test_forged_mac_is_refused(mac: bytes) -> None:
    """The checksum is right: an attacker with write access can compute it."""
    slab = sealed(OURS)
    start = slab.index(b"blake3:")
    stop = slab.index(b'"', start)
    slab[start:stop] = mac
    slab[PROLOGUE_BYTES - stop + start + len(mac) : -12] = b" " * (stop - start - len(mac))
    with pytest.raises(ObjectCorrupt, match="MAC"):
        unseal(memoryview(slab), KEY, integrity=OURS)


def test_mac_covers_header_and_payload() -> None:
    believed, payload = b"facts", memoryview(b"payload")
    mac = OURS.mac(believed, payload)
    assert OURS.accepts(mac, believed, payload)
    assert not OURS.accepts(mac, b"other", payload)
    assert not OURS.accepts(mac, believed, memoryview(b"other"))
    assert not OURS.accepts("\ud800", believed, payload)


def test_fingerprint_identifies_the_key_without_revealing_it() -> None:
    assert OURS.name == Integrity(SECRET.encode()).name != OTHERS.name
    assert len(OURS.name) == 16
    assert OURS.name not in OURS.mac(b"", memoryview(b""))


def test_key_may_come_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(SECRET + "\n")
    monkeypatch.setenv("OUR_KEY", SECRET)
    for text in (SECRET, "env:OUR_KEY", f"file:{tmp_path}/key"):
        found = opened(text)
        assert found is not None
        assert found.name == OURS.name
    assert opened("") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("env:NOT_SET_AT_ALL", "env:NOT_SET_AT_ALL holds 0 bytes"),
        ("file:/does/not/exist", "/does/not/exist cannot be read"),
        ("file:/a\0b", "cannot be read"),
        ("file:", "cannot be read"),
        ("hidden", "it holds 6 bytes; a key is 32 random bytes or more: make one with: openssl"),
        (SECRET[:31], "it holds 31 bytes"),
    ],
)
def test_invalid_key_is_refused_with_a_fix(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(text)
    assert str(caught.value).startswith("options.integrity_key: ")
    assert words in str(caught.value)
    assert ":" in text or text[:6] not in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        SECRET.encode(),
        SECRET.upper().encode(),
        base64.b64encode(bytes.fromhex(SECRET)),
        base64.urlsafe_b64encode(bytes.fromhex(SECRET)).rstrip(b"="),
        base64.encodebytes(bytes.fromhex(SECRET) * 2 + b"odd"),
        bytes.fromhex(SECRET),
    ],
)
def test_key_may_be_hex_base64_or_raw_bytes(tmp_path: Path, key: bytes) -> None:
    (tmp_path / "key").write_bytes(key)
    assert opened(f"file:{tmp_path}/key") is not None


def test_key_is_not_in_the_configs_repr() -> None:
    assert SECRET not in repr(StoreConfig(url="/x", integrity_key=SECRET))


def test_mac_is_made_with_one_key_and_accepted_of_two() -> None:
    both = opened(SECRET, accepted_integrity_key=OLD)
    old, other = Integrity(OLD.encode()), opened(OLD, accepted_integrity_key=SECRET)
    assert sealed(both) == sealed(OURS)
    for integrity in (both, other):
        for writer in (OURS, old):
            assert unseal(memoryview(sealed(writer)), KEY, integrity=integrity).spec == FACTS
        with pytest.raises(ObjectForeign, match="MAC"):
            unseal(memoryview(sealed(OTHERS)), KEY, integrity=integrity)


def test_name_stays_when_the_key_changes() -> None:
    one, two = opened(SECRET, accepted_integrity_key=OLD), opened(OLD, integrity_name=OURS.name)
    assert one is not None
    assert two is not None
    assert one.name == two.name == OURS.name != Integrity(OLD.encode()).name


@pytest.mark.parametrize("option", ["accepted_integrity_key", "integrity_name"])
def test_option_of_a_key_without_the_key_is_refused(option: str) -> None:
    """The engine would check no MAC, although its user thinks of keys."""
    with pytest.raises(ConfigError, match=rf"options\.{option}: it needs an integrity_key"):
        opened("", **{option: OLD})


def test_accepted_key_is_checked_and_hidden_as_the_key_itself() -> None:
    with pytest.raises(ConfigError, match=r"options\.accepted_integrity_key: it holds 6 bytes"):
        opened(SECRET, accepted_integrity_key="hidden")
    config = StoreConfig(url="/x", integrity_key="env:X", accepted_integrity_key=OLD)
    assert OLD not in repr(config)
    (warning,) = config.warnings("options")
    assert warning.startswith("options.accepted_integrity_key: a secret is written into")
    assert OLD not in warning
