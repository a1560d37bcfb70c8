# SPDX-License-Identifier: Apache-2.0
"""A keyed MAC over objects: for buckets that others may write to.

Keyed BLAKE3. What goes into the hash function is derived from the user's key, so that neither the
MACs nor the fingerprint tell it, and neither helps to make the other.
"""

import hmac

from blake3 import blake3

from ecshare.store.errors import ConfigError
from ecshare.store.secrets import referenced

_SHORTEST = 16  # characters: whoever reads the bucket can try out short ones at leisure
_MAC_CONTEXT = "ecshare 2026-11 object mac"
_ROW_CONTEXT = "ecshare 2026-11 row mac"
_ROWS_CONTEXT = "ecshare 2026-11 rows mac"
_FINGERPRINT_CONTEXT = "ecshare 2026-11 integrity key fingerprint"
_PREFIX = "blake3:"


class Integrity:
    """Makes and checks MACs with one key. Any thread."""

    def __init__(self, secret: bytes) -> None:
        self._key = blake3(secret, derive_key_context=_MAC_CONTEXT).digest()
        self._row_key = blake3(secret, derive_key_context=_ROW_CONTEXT).digest()
        self._rows_key = blake3(secret, derive_key_context=_ROWS_CONTEXT).digest()
        self.fingerprint = blake3(secret, derive_key_context=_FINGERPRINT_CONTEXT).hexdigest()[:16]
        """16 hex digits that tell keys apart without telling the key."""

    def mac(self, believed: bytes, payload: memoryview) -> str:
        """The MAC of what a reader believes of an object, and of its payload."""
        digest = blake3(believed, key=self._key)
        digest.update(payload)
        return _PREFIX + digest.hexdigest()

    def of_row(self, row: memoryview) -> bytes:
        """The MAC of one row of an object, 32 bytes; see rows.py."""
        return blake3(row, key=self._row_key).digest()

    def of_rows(self, text: bytes) -> bytes:
        """The MAC of what binds an object's rows together, 32 bytes; see rows.py."""
        return blake3(text, key=self._rows_key).digest()

    def accepts(self, mac: str, believed: bytes, payload: memoryview) -> bool:
        """Whether `mac` is the one that `mac()` gives."""
        return hmac.compare_digest(
            mac.encode("utf-8", "surrogatepass"), self.mac(believed, payload).encode()
        )


def open_integrity(text: str, path: str) -> Integrity | None:
    """Read the option `integrity_key`: "env:NAME", "file:/path", or the key itself; "": none.

    `path` is where the user wrote the options. Raises ConfigError without telling the key.
    """
    if not text:
        return None
    option = f"{path}.integrity_key"
    if text.startswith("env:"):
        secret = referenced(text, option)
        source = f"the environment variable {text.removeprefix('env:')!r}"
    elif text.startswith("file:"):
        secret, source = referenced(text, option), text
    else:
        secret, source = text.encode("utf-8", "surrogatepass"), "it"
    if len(secret) < _SHORTEST:
        raise ConfigError(
            f"{option}: {source} holds {len(secret)} bytes, a key needs {_SHORTEST} or more; "
            "make one with: openssl rand -hex 32"
        )
    return Integrity(secret)
