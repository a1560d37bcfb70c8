# SPDX-License-Identifier: Apache-2.0
"""A key that clients send as `Authorization: Bearer KEY`."""

import hmac

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
