# SPDX-License-Identifier: Apache-2.0
"""Names and hooks that moved between vLLM releases; the only place that asks."""

from typing import Any


def register_once(factory: Any, name: str, module_path: str) -> None:
    """Register class `name` of `module_path` with a vLLM connector `factory`, unless it is there.

    Factories refuse a second registration and have no public way to ask, in every release so far.
    """
    try:
        factory.register_connector(name, module_path, name)
    except ValueError as exc:
        if "already registered" not in str(exc):
            raise
