# SPDX-License-Identifier: Apache-2.0
"""A key that clients show in `Authorization: Bearer KEY`."""

import hmac
import os
from pathlib import Path

_SHORTEST_BYTES = 16
_LONGEST_BYTES = 4096
_BEARER = "bearer "


class Secret:
    """A key that nothing prints."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def is_shown_by(self, authorization: str | None) -> bool:
        """Tell, in a time that says nothing about the key, whether a header's value holds it."""
        scheme, shown = (authorization or "")[: len(_BEARER)], (authorization or "")[len(_BEARER) :]
        is_key = hmac.compare_digest(shown.strip().encode("utf-8", "surrogateescape"), self._key)
        return is_key and scheme.lower() == _BEARER

    def __repr__(self) -> str:
        return "Secret(...)"


def read_secret(text: str) -> Secret:
    """Read a key from `env:NAME` or `file:PATH`; raises ValueError with a sentence.

    The sentence repeats nothing that could be a key given in the wrong place.
    """
    where, _, name = text.partition(":")
    if where == "env" and name:
        key = os.environ.get(name, "").encode("utf-8", "surrogateescape").strip()
    elif where == "file" and name:
        key = _from_file(Path(name))
    else:
        raise ValueError("a key is given as env:NAME or file:PATH")
    if not _SHORTEST_BYTES <= len(key) <= _LONGEST_BYTES:
        raise ValueError(
            f"{text!r} holds {len(key)} bytes, a key has {_SHORTEST_BYTES} to {_LONGEST_BYTES}; "
            "make one with: openssl rand -hex 32"
        )
    return Secret(key)


def _from_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_LONGEST_BYTES + 2).strip()
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        raise ValueError(f"'file:{path}' cannot be read ({reason})") from exc
