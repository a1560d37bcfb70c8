# SPDX-License-Identifier: Apache-2.0
"""Limits what may stay in a store: bytes and hours for the whole store, a kind, a tenant, or a
namespace."""

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
_TENANT = "tenant:"
_TENANT_SCOPE = re.compile(rf"{_TENANT}[A-Za-z0-9._-]{{1,64}}")
_GAP_MINUTES = 60
_OLD_MINUTES = 48 * 60
_REPORT_MINUTES = 30 * 24 * 60
# Entries of the buffers for vLLM before V1 may reappear within an hour: see take_once.py.
_BUFFER_MINUTES = 60


Tenants = Mapping[tuple[str, str], str]
"""Tenants by kind and namespace. A namespace that is missing has no tenant."""


def tenant_scope(tenant: str) -> str:
    """Return the scope of all namespaces of a tenant."""
    return _TENANT + tenant


class Budget(Struct, frozen=True):
    """Limits by scope: ALL, "ec" or "kv", a `tenant_scope`, or a namespace."""

    max_bytes: Mapping[str, int] = {}
    ttl_hours: Mapping[str, float] = {}
    """Hours since the last use. The narrowest scope counts."""

    @property
    def has_tenants(self) -> bool:
        """Return whether there is a limit for a tenant."""
        return any(scope.startswith(_TENANT) for scope in (*self.max_bytes, *self.ttl_hours))

    def ttl_minutes(self, kind: str, namespace: str, tenant: str = "") -> int:
        """Return the minutes after which an unused object is removed; FOREVER: it is not."""
        for scope in (namespace, tenant_scope(tenant), kind, ALL):
            if scope in self.ttl_hours:
                return min(int(self.ttl_hours[scope] * 60), FOREVER - 1)
        return FOREVER

    def rules(
        self,
        spaces: Sequence[Space],
        tenants: Tenants,
        growth: Sequence[int] = (),
        num_parts: int = 1,
    ) -> Rules:
        """Return the rules of these spaces. `growth`: `Limit.growth` of each space. `num_parts`:
        the spaces have one of this many equal parts of all names."""
        of_spaces = [tenants.get((each.kind, each.namespace), "") for each in spaces]
        scopes = [
            {ALL, space.kind, space.namespace, tenant_scope(tenant)}
            for space, tenant in zip(spaces, of_spaces, strict=True)
        ]
        limits = []
        for scope, most in self.max_bytes.items():
            inside = frozenset(n for n, own in enumerate(scopes) if scope in own)
            limits.append(
                Limit(inside, most // num_parts, sum(growth[n] for n in inside) if growth else 0)
            )
        holds = [_BUFFER_MINUTES if each.role is Role.BUFFER else 0 for each in spaces]
        return Rules(limits, [*map(self._ttl_of, spaces, of_spaces)], holds)

    def _ttl_of(self, space: Space, tenant: str) -> int:
        if space.role is Role.GAPS:
            return _GAP_MINUTES
        if space.role is Role.OLD:
            return _OLD_MINUTES
        if space.role is Role.REPORTS:  # useless without the embeddings
            return min(self.ttl_minutes(Kind.EC, ""), _REPORT_MINUTES)
        ttl = self.ttl_minutes(space.kind, space.namespace, tenant)
        return max(ttl, _BUFFER_MINUTES) if space.role is Role.BUFFER else ttl


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
        is_one = _TENANT_SCOPE.fullmatch(scope) or is_namespace(scope)
        if scope not in (ALL, *Kind) and not is_one:
            raise ConfigError(
                f"{option}: {_shown(scope)} is neither ec nor kv nor a namespace of 32 hex digits "
                "nor tenant: and a name"
            )
        if scope in found:
            raise ConfigError(f"{option}: {_shown(argument)} is a second value of the same scope")
        found[scope] = text
    return list(found.items())


def read_size(text: str, option: str = "--max-bytes") -> int:
    """Return the bytes of "500GB", "1.5 TiB" or "1000", which the user wrote as `option`.

    Raises:
        ConfigError: `text` is not a size; quotes it.
    """
    found = _NUMBER.fullmatch(text)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ConfigError(f"{option}: {_shown(text)} is no size; write 500GB or 1.5TiB")
    return int(float(found[1]) * unit)


def _read_hours(text: str) -> float:
    found = _NUMBER.fullmatch(text)
    if found is None or found[2]:
        raise ConfigError(f"--ttl: {_shown(text)} is no number of hours; write 48 or 0.5")
    return float(found[1])


def _shown(text: str) -> str:
    return ascii(text)[:80]
