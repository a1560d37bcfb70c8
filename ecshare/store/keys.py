# SPDX-License-Identifier: Apache-2.0
"""The keys of objects. Pure.

    <kind>/<format version>/<namespace>/<first 2 hex>/<sha256 hex>[.part]     an object
    <kind>/<format version>/<namespace>/<first 2 hex>/<sha256 hex>.gap        it will not be stored
    <kind>/<format version>/manifests/<namespace>                            the namespace's facts
    <kind>/<format version>/sizes/<namespace>/<n>                            chunks have n shards
    epochs/1/<digest of the model's name and of the integrity key's>          see epochs.py
    upkeep/1/...                                                            see the end of this file

Every string that a client can choose is hashed before it becomes part of a key.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any

from blake3 import blake3

JSON = Any  # None, bool, int, float, str, and lists and string-keyed dicts of them

FORMAT_VERSION = 2
"""Changes with the meaning of bytes or keys: versions never see each other's objects."""

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"[a-z0-9_-]{1,32}")
_OBJECT_KEY = re.compile(
    rf"(?:ec|kv)/{FORMAT_VERSION}/[0-9a-f]{{32}}/([0-9a-f]{{2}})/(?=\1)[0-9a-f]{{64}}(?:\.[a-z0-9_-]{{1,32}})?"
)
# One level of a key. It never begins with a dot, so '..' is excluded, and names with a dot are left
# to the temporary files of backends.
_SEGMENT = r"[a-z0-9_-][a-z0-9._-]{0,127}"
_SAFE_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT}){{0,7}}")


def is_safe_key(key: str) -> bool:
    """Return whether a backend may use this key as a relative path, below the store's root."""
    return _SAFE_KEY.fullmatch(key) is not None


class Key(str):
    """A key that a backend may use as a relative path, below the store's root.

    The text is checked when the key is made, and again when it is unpickled.

    Raises:
        ValueError: the text could leave the root.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> "Key":
        """Return `text` as a key."""
        if type(text) is cls:
            return text
        if not is_safe_key(text):
            raise ValueError(f"not a key of this store: {text[:200]!r}")
        return super().__new__(cls, text)


MEDIA_DIGESTS = {name: blake3(name.encode() + b"\0") for name in ("image", "audio", "video")}
"""How digests of media begin, by modality; to be copied. An item's uuid behind the router is the
BLAKE3, in hex, of its modality, NUL and its bytes."""

PROBE_KEY = Key("probe/object")
"""An object with which writers test whether the store accepts writes."""


class Kind(StrEnum):
    """The content of objects: embeddings or KV."""

    EC = "ec"
    KV = "kv"


def object_key(kind: Kind, namespace: str, name: str | bytes, part: str = "") -> Key:
    """Return the key of the object `name` (any text or bytes: it is hashed) in `namespace`.

    `part` distinguishes several objects of one name, e.g. the shards of a chunk. It matches
    `[a-z0-9_-]{1,32}`.

    Raises:
        ValueError: `namespace` or `part` has another form.
    """
    if part and not _PART.fullmatch(part):
        raise ValueError(f"a part must match [a-z0-9_-]{{1,32}}, got {part!r}")
    # The first byte keeps b"x" and "x" apart. Text from JSON may hold lone surrogates.
    raw = b"b" + name if isinstance(name, bytes) else b"s" + name.encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(raw).hexdigest()
    suffix = f".{part}" if part else ""
    return Key(f"{_space(kind, namespace)}/{digest[:2]}/{digest}{suffix}")


def gap_key(key: Key) -> Key:
    """Return the key of the note that the object under `key` will not be stored.

    See absence_notes.py. All parts of an object share it.
    """
    folder, _, name = key.rpartition("/")
    return Key(f"{folder}/{name.partition('.')[0]}.gap")


def manifest_key(kind: Kind, namespace: str) -> Key:
    """Return the key of the facts of `namespace`.

    Raises:
        ValueError: it is not a namespace.
    """
    return Key(manifests_prefix(kind) + _checked(namespace))


def tp_size_key(kind: Kind, namespace: str, size: int) -> Key:
    """Return the key of the mark of engines that store chunks of `namespace` in `size` shards.

    Raises:
        ValueError: it is not a namespace.
    """
    return Key(f"{marks_prefix(kind, namespace)}{size}")


def marks_prefix(kind: Kind, namespace: str) -> str:
    """Return the common prefix of the keys that `tp_size_key` makes.

    Raises:
        ValueError: it is not a namespace.
    """
    return f"{kind_prefix(kind)}sizes/{_checked(namespace)}/"


def kind_prefix(kind: Kind) -> str:
    """Return the common prefix of all keys of a kind, also those of manifests and marks."""
    return f"{Kind(kind)}/{FORMAT_VERSION}/"


def manifests_prefix(kind: Kind) -> str:
    """Return the common prefix of the keys of all manifests of a kind.

    Objects have another prefix: there may be millions, and a listing of manifests must be short.
    """
    return f"{kind_prefix(kind)}manifests/"


def namespace_prefix(kind: Kind, namespace: str) -> str:
    """Return the common prefix of the keys of all objects of `namespace`.

    Raises:
        ValueError: it is not a namespace.
    """
    return f"{_space(kind, namespace)}/"


def epoch_key(model: str, integrity: str) -> Key:
    """Return the key of the epoch of a model, for engines whose integrity key has that name, or
    ""."""
    named = f"{integrity}\n{model}".encode("utf-8", "surrogatepass")
    return Key(f"epochs/1/{hashlib.sha256(named).hexdigest()[:32]}")


def is_namespace(text: str) -> bool:
    """Return whether `namespace_digest` could have made this text."""
    return _NAMESPACE.fullmatch(text) is not None


def namespace_digest(facts: Mapping[str, JSON]) -> str:
    """Return 128 bits, in hex, that differ if one fact differs.

    Raises:
        TypeError: a name in `facts` is not a string, or a value is not JSON.
        ValueError: `facts` contain NaN or infinity.
    """
    return hashlib.sha256(canonical_json(facts)).hexdigest()[:32]


def is_object_key(key: str) -> bool:
    """Return whether `object_key` could have made this key."""
    return _OBJECT_KEY.fullmatch(key) is not None


def canonical_json(value: JSON) -> bytes:
    """Return the only canonical JSON text of `value`: sorted keys, no blanks, ASCII.

    Raises:
        TypeError: a dict key is not a string, or a value is not JSON.
        ValueError: a number is NaN or infinite.
    """
    _check_names(value)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def _check_names(value: JSON) -> None:
    """Check that all names are strings: `json` writes 1 and "1" alike, which would merge facts."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise TypeError(f"a JSON object's names are strings, got {name!r}")
            _check_names(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_names(inner)


@lru_cache(maxsize=8)
def _space(kind: Kind, namespace: str) -> str:
    return f"{Kind(kind)}/{FORMAT_VERSION}/{_checked(namespace)}"


def _checked(namespace: str) -> str:
    if not is_namespace(namespace):
        raise ValueError(f"a namespace is 32 hex digits, got {namespace!r}")
    return namespace


# What `ecshare.upkeep` keeps in a store. No reader of objects lists this prefix.

UPKEEP_PREFIX = "upkeep/1/"
USES_PREFIX = "upkeep/1/uses/"
"""The common prefix of all notes and indexes of when objects were last used."""
LEASES_PREFIX = "upkeep/1/lease/"
"""The common prefix of the leases of engines that clean."""
CLOCK_PREFIX = "upkeep/1/clock/"
"""The common prefix of objects that exist only to learn the time of the store's clock."""
CLEANED_PREFIX = "upkeep/1/cleaned/"
CLEANED_KEY = Key(CLEANED_PREFIX + "last")
"""An object whose age is the time since the last clean-up began."""


def uses_prefix(kind: Kind) -> str:
    """Return the common prefix of the notes and indexes of one kind."""
    return f"{USES_PREFIX}{Kind(kind)}/"


def new_uses_key(kind: Kind) -> Key:
    """Return a key that no other note or index has."""
    return Key(uses_prefix(kind) + secrets.token_hex(16))


def new_clock_key() -> Key:
    """Return a key that no other process uses to learn the store's time."""
    return Key(CLOCK_PREFIX + secrets.token_hex(16))


def lease_key(kind: Kind, slot: int, tenant: str = "") -> Key:
    """Return the key whose creator cleans the objects of `kind` in that slot of time, by the budget
    of `tenant`."""
    whose = f"-{hashlib.sha256(tenant.encode()).hexdigest()[:16]}" if tenant else ""
    return Key(f"{LEASES_PREFIX}{Kind(kind)}-{slot}{whose}")


def use_id(namespace: str, digest: str) -> int:
    """Return 64 bits that identify all objects of one name: the shards of a chunk, for example.

    `namespace` and `digest` are the levels of an object's key. Both are uniform, so their first 64
    bits are combined and not hashed again.
    """
    return int(namespace[:16], 16) ^ int(digest[:16], 16)


def use_id_of(key: Key) -> int:
    """Return the `use_id` of the object under `key`, which `object_key` has made."""
    _, _, namespace, _, name = key.split("/")
    return use_id(namespace, name[:64])
