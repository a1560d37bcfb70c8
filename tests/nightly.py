# SPDX-License-Identifier: Apache-2.0
"""Parameters that only `make nightly` tries. One value of each kind stays in the gate."""

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def nightly(*values: object) -> list[ParameterSet]:
    """Return values of a parameter that only the nightly tries."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


def gate_tries(first: object, *others: object) -> list[object]:
    """Return values of a parameter of which the gate tries only the first."""
    return [first, *nightly(*others)]


def gate_tries_only(chosen: Iterable[object], values: Iterable[object]) -> list[object]:
    """Return the values of a parameter in order; the gate tries only those in `chosen`."""
    kept = set(chosen)
    tried = list(values)
    assert kept <= set(tried), f"{kept - set(tried)} is no value"
    return [value if value in kept else nightly(value)[0] for value in tried]
