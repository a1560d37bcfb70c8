# SPDX-License-Identifier: Apache-2.0
"""A keyed MAC over objects, for buckets to which others can write.

The MAC is keyed BLAKE3. The MAC key and the fingerprint are derived from the user's key, so that
neither the MACs nor the fingerprint reveal it, and neither helps to make the other.
"""

import hmac
from copy import copy

from blake3 import blake3

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError
from ecshare.store.secrets import is_reference, referenced

# A reader of the bucket can test any number of keys offline, on a MAC or on the fingerprint.
_FEWEST_BYTES = 32
_MAC_CONTEXT = "ecshare 2026-11 object mac"
_FINGERPRINT_CONTEXT = "ecshare 2026-11 integrity key fingerprint"
_ROUTER_CONTEXT = "ecshare 2026-11 router token"
_PREFIX = "blake3:"

TOKEN_HEADER = "x-ecshare-router"
"""The HTTP header in which a router shows its token."""


class Integrity:
    """Makes MACs with one key, and accepts those of another one, too. Any thread."""

    def __init__(self, secret: bytes, accepted: bytes = b"", name: str = "") -> None:
        """`accepted`: the second key, if there is one. `name`: see `StoreConfig.integrity_name`."""
        keys = [secret, accepted] if accepted else [secret]
        self.accepts_two = len(keys) > 1
        """True while a key is changed."""
        self._keys = [blake3(key, derive_key_context=_MAC_CONTEXT).digest() for key in keys]
        self.name = name or blake3(secret, derive_key_context=_FINGERPRINT_CONTEXT).hexdigest()[:16]
        """The fact of a namespace that distinguishes keys. By default 16 hex digits of the key's
        fingerprint. They are public: they confirm a right guess, but 32 random bytes cannot be
        guessed."""

    def mac(self, signed: bytes, payload: memoryview) -> str:
        """Return the MAC of an object: of its authenticated header fields and its payload."""
        return _mac(self._keys[0], signed, payload)

    def of_one_key(self) -> "Integrity":
        """Return one that accepts only the MACs that this one makes."""
        one = copy(self)
        one.accepts_two, one._keys = False, self._keys[:1]
        return one

    def accepts(self, mac: str, signed: bytes, payload: memoryview) -> bool:
        """Return whether `mac` was made for this object with one of the keys. The time that it
        takes depends on nothing but which key."""
        given = mac.encode("utf-8", "surrogatepass")
        return any(
            hmac.compare_digest(given, _mac(key, signed, payload).encode()) for key in self._keys
        )


def _mac(key: bytes, signed: bytes, payload: memoryview) -> str:
    digest = blake3(signed, key=key)
    digest.update(payload)
    return _PREFIX + digest.hexdigest()


def open_integrity(config: StoreConfig, path: str) -> Integrity | None:
    """Read the keys of `config`: "env:NAME", "file:/path", or the key itself. None: it has none.

    `path`: where the user wrote the options.

    Raises:
        ConfigError: see `read_key`; or a key is missing.
    """
    if config.integrity_key:
        key = read_key(config.integrity_key, f"{path}.integrity_key")
        second = config.accepted_integrity_key
        accepted = read_key(second, f"{path}.accepted_integrity_key") if second else b""
        return Integrity(key, accepted, config.integrity_name)
    for name in ("accepted_integrity_key", "integrity_name"):
        if getattr(config, name):
            raise ConfigError(f"{path}.{name}: it needs an integrity_key, which is missing")
    return None


def read_key(text: str, option: str, *, in_public: bool = False, is_sent: bool = False) -> bytes:
    """Return the key that `text` is, or to which it refers: "env:NAME" or "file:/path".

    `option`: the user's name for it. `in_public`: other users can see `text`, so it must be a
    reference. `is_sent`: clients send the key as text, so blanks around it are not part of it.

    Raises:
        ConfigError: the key cannot be read, or is too short. The message does not contain the key.
    """
    if in_public and not (is_reference(text) and text.partition(":")[2]):
        raise ConfigError(f"{option} is given as env:NAME or file:/path")
    source = text if is_reference(text) else "it"
    key = referenced(text, option) if is_reference(text) else text.encode("utf-8", "surrogatepass")
    if is_sent:
        key = key.strip()
    if len(key) < _FEWEST_BYTES:
        raise ConfigError(
            f"{option}: {source} holds {len(key)} bytes; a key is {_FEWEST_BYTES} random bytes or "
            "more: make one with: openssl rand -hex 32"
        )
    return key


def router_token(key: bytes) -> str:
    """Return the token that the router sends to engines with the same `key`: 64 hex digits."""
    return blake3(key, derive_key_context=_ROUTER_CONTEXT).hexdigest()
