# SPDX-License-Identifier: Apache-2.0
"""What may stay in a store: bytes and hours, of the whole store, of a kind, or of a namespace."""

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from ecshare.store.errors import ConfigError
from ecshare.store.keys import Kind, is_namespace
from ecshare.upkeep.inventory import Role, Space
from ecshare.upkeep.plan import FOREVER, Limit, Rules

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "pib": 1 << 50}
_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]{0,3})", re.IGNORECASE)

ALL = ""
"""The scope of the whole store."""
_GAP_MINUTES = 60
_OLD_MINUTES = 48 * 60
_REPORT_MINUTES = 30 * 24 * 60
# See take_once.py of the buffers for vLLM before V1: nothing reappears after an hour.
_BUFFER_MINUTES = 60


class Budget(Struct, frozen=True):
    """Limits by scope: ALL, "ec" or "kv", or a namespace."""

    max_bytes: Mapping[str, int] = {}
    ttl_hours: Mapping[str, float] = {}
    """Hours since the last use. The narrowest scope counts."""

    def ttl_minutes(self, kind: str, namespace: str) -> int:
        """Return the minutes after which an object is removed; FOREVER: it is not."""
        for scope in (namespace, kind, ALL):
            if scope in self.ttl_hours:
                return min(int(self.ttl_hours[scope] * 60), FOREVER - 1)
        return FOREVER

    def rules(self, spaces: Sequence[Space]) -> Rules:
        """Return the rules of these spaces."""
        limits = [
            Limit(frozenset(n for n, space in enumerate(spaces) if _is_in(space, scope)), most)
            for scope, most in self.max_bytes.items()
        ]
        holds = [_BUFFER_MINUTES if each.role is Role.BUFFER else 0 for each in spaces]
        return Rules(limits, [self._ttl_of(space) for space in spaces], holds)

    def _ttl_of(self, space: Space) -> int:
        if space.role is Role.GAPS:
            return _GAP_MINUTES
        if space.role is Role.OLD:
            return _OLD_MINUTES
        if space.role is Role.REPORTS:  # they are of no use without the embeddings
            return min(self.ttl_minutes(Kind.EC, ""), _REPORT_MINUTES)
        ttl = self.ttl_minutes(space.kind, space.namespace)
        return max(ttl, _BUFFER_MINUTES) if space.role is Role.BUFFER else ttl


def _is_in(space: Space, scope: str) -> bool:
    return scope in (ALL, space.kind, space.namespace)


def read_budget(sizes: Sequence[str], hours: Sequence[str]) -> Budget:
    """Return the budget of arguments such as "500GB", "kv=400GiB" and "<namespace>=24".

    Raises:
        ConfigError: one is wrong; quotes it.
    """
    return Budget(
        {scope: read_size(text) for scope, text in _scoped(sizes, "--max-bytes")},
        {scope: _read_hours(text) for scope, text in _scoped(hours, "--ttl")},
    )


def _scoped(arguments: Sequence[str], option: str) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for argument in arguments:
        scope, _, text = argument.rpartition("=")
        if scope not in (ALL, *Kind) and not is_namespace(scope):
            raise ConfigError(
                f"{option}: {_shown(scope)} is neither ec nor kv nor a namespace of 32 hex digits"
            )
        if scope in found:
            raise ConfigError(f"{option}: {_shown(argument)} is a second value of the same scope")
        found[scope] = text
    return list(found.items())


def read_size(text: str) -> int:
    """Return the bytes of "500GB", "1.5 TiB" or "1000".

    Raises:
        ConfigError: it is no size; quotes it.
    """
    found = _NUMBER.fullmatch(text)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ConfigError(f"--max-bytes: {_shown(text)} is no size; write 500GB or 1.5TiB")
    return int(float(found[1]) * unit)


def _read_hours(text: str) -> float:
    found = _NUMBER.fullmatch(text)
    if found is None or found[2]:
        raise ConfigError(f"--ttl: {_shown(text)} is no number of hours; write 48 or 0.5")
    return float(found[1])


def _shown(text: str) -> str:
    return ascii(text)[:80]
