# SPDX-License-Identifier: Apache-2.0
"""Every ask on docs/asks.md has a number of its own, says who asks, and has an answer."""

import re

from tests.docs.pages import ROOT

PAGE = " ".join((ROOT / "docs" / "asks.md").read_text().split())
BEGIN = re.compile(r"\*\*(\d+)\. ([^*]+)\*\* ")
ANSWERED = re.compile(r"\(([^()]*#\d+[^()]*)\)\. \*\*(Yes|Partly|Open)\b")


def test_asks_are_numbered_in_order() -> None:
    numbers = [int(number) for number, _ in BEGIN.findall(PAGE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > 50


def test_every_ask_names_its_source_and_is_answered() -> None:
    _, *asks = BEGIN.split(PAGE)
    for number, text in zip(asks[::3], asks[2::3], strict=True):
        assert ANSWERED.match(text), number
