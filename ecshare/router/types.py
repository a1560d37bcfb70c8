# SPDX-License-Identifier: Apache-2.0
"""The stages of a request, and the work that a request is for an engine."""

from enum import StrEnum
from typing import NamedTuple


class Stage(StrEnum):
    """The three steps of a request."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class Work(NamedTuple):
    """What an engine has to do for a request. stages/plan.py estimates it."""

    key: bytes = b""
    """Requests with the same key have media or the start of a prompt in common; empty: unknown."""
    tokens: int = 0
    model: str | None = None
    """Only engines that serve it get the work; None: any engine does."""
