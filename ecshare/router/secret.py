# SPDX-License-Identifier: Apache-2.0
"""A key that clients send as `Authorization: Bearer KEY`."""

import hmac

from ecshare.store.errors import ConfigError
from ecshare.store.secrets import referenced

_SHORTEST_BYTES = 16
_LONGEST_BYTES = 4096
_BEARER = "bearer "


class Secret:
    """A key that is never printed."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def matches(self, authorization: str | None) -> bool:
        """Tell, in constant time, whether an Authorization header holds the key."""
        scheme, shown = (authorization or "")[: len(_BEARER)], (authorization or "")[len(_BEARER) :]
        is_key = hmac.compare_digest(shown.strip().encode("utf-8", "surrogateescape"), self._key)
        return is_key and scheme.lower() == _BEARER

    def __repr__(self) -> str:
        return "Secret(...)"


def read_secret(text: str) -> Secret:
    """Read a key from `env:NAME` or `file:PATH`.

    Raises:
        ConfigError: there is no valid key. The message repeats nothing that could be a misplaced
            key.
    """
    where, _, name = text.partition(":")
    if where not in ("env", "file") or not name:
        raise ConfigError("a key is given as env:NAME or file:PATH")
    key = referenced(text, "the key").strip()
    if not _SHORTEST_BYTES <= len(key) <= _LONGEST_BYTES:
        raise ConfigError(
            f"{text!r} holds {len(key)} bytes, a key has {_SHORTEST_BYTES} to {_LONGEST_BYTES}; "
            "make one with: openssl rand -hex 32"
        )
    return Secret(key)
