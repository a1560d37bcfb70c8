# SPDX-License-Identifier: Apache-2.0
"""Cases that `make nightly` runs and the gate does not: of each kind, one stays in the gate."""

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def nightly(*values: object) -> list[ParameterSet]:
    """Values of a parameter that only the nightly tries."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


def gate_tries(first: object, *others: object) -> list[object]:
    """Values of a parameter of which the gate tries the first alone."""
    return [first, *nightly(*others)]


def gate_tries_only(chosen: Iterable[object], values: Iterable[object]) -> list[object]:
    """The values of a parameter, in their order, of which the gate tries those in `chosen`."""
    kept = set(chosen)
    tried = list(values)
    assert kept <= set(tried), f"{kept - set(tried)} is no value"
    return [value if value in kept else nightly(value)[0] for value in tried]
