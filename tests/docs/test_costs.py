# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/costs.md are what `ecshare cost` computes."""

import json
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from ecshare.cli import main
from ecshare.commands.costing import PRICES
from tests.docs.pages import ROOT, commands, fences

PATH = ROOT / "docs" / "costs.md"
PAGE = PATH.read_text()
ROWS = re.findall(r"^\| `(--[^`]+)`: [^|]*\|([^\n]*)\|$", PAGE, re.MULTILINE)

Cost = Callable[..., str]


@pytest.fixture
def cost(capsys: pytest.CaptureFixture[str]) -> Cost:
    """Run the command; return what it printed."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["cost", *arguments])
        assert not ended.value.code
        return capsys.readouterr().out

    return run


@pytest.fixture
def of_row(cost: Cost) -> Callable[..., dict[str, Any]]:
    """Return the result for the options of a row, with further ones."""

    def run(number: int, *more: str) -> dict[str, Any]:
        found = json.loads(cost(*shlex.split(ROWS[number][0]), *more, "--json"))
        assert isinstance(found, dict)
        return found

    return run


@pytest.mark.parametrize("number", range(4))
def test_rows_equal_the_commands_result(of_row: Callable[..., dict[str, Any]], number: int) -> None:
    assert len(ROWS) == 4
    found = of_row(number)
    prices = [round(1e6 * found["dollars"][name]) for name in ("compute", "store", "load")]
    said = [float(figure) for figure in ROWS[number][1].split("|")]
    assert said == [*prices, round(found["loads_that_pay"], 1)]


FIGURES: list[tuple[str, int, tuple[str, ...], Callable[[dict[str, Any]], float]]] = [
    (r"week it costs (\S+) \$/M", 3, ("--hours", "168"), lambda of: 1e6 * of["dollars"]["store"]),
    (r"30 days would cost (\S+)\s", 0, ("--hours", "720"), lambda of: 1e3 * of["dollars"]["store"]),
    (r"look-ups alone \((\S+) \$/M\)", 0, (), lambda of: 1e6 * of["dollars"]["look_up"]),
    (r"it, (\S+) of the 492 \$/M", 0, (), lambda of: 1e6 * of["dollars"]["space"]),
    (r"(\S+) GB/s in the first row", 0, (), lambda of: of["pays_from_bytes_per_s"] / 1e9),
    (r"(\S+) GB/s in the second", 1, (), lambda of: of["pays_from_bytes_per_s"] / 1e9),
    (r"(\S+) GB/s in the third", 2, (), lambda of: of["pays_from_bytes_per_s"] / 1e9),
]


@pytest.mark.parametrize(("words", "row", "more", "figure"), FIGURES)
def test_figures_in_the_text_equal_the_commands_result(
    of_row: Callable[..., dict[str, Any]],
    words: str,
    row: int,
    more: tuple[str, ...],
    figure: Callable[[dict[str, Any]], float],
) -> None:
    (said,) = re.findall(words, " ".join(PAGE.split()))
    decimals = len(said.partition(".")[2])
    assert float(said) == round(figure(of_row(row, *more)), decimals)


def test_words_in_the_text_agree_with_the_command(of_row: Callable[..., dict[str, Any]]) -> None:
    assert "An embedding pays with its first load" in PAGE
    assert of_row(3)["loads_that_pay"] < 1
    assert "pays with the second" in PAGE
    assert round(of_row(3, "--hours", "168")["loads_that_pay"]) == 2
    assert "five times what it costs to compute it" in PAGE
    dollars = of_row(0)["dollars"]
    assert round(dollars["store"] / dollars["compute"]) == 5


def test_printed_example_equals_the_commands_output(cost: Cost) -> None:
    (words,) = [words for words in commands(PATH) if words[:2] == ["ecshare", "cost"]]
    (text,) = fences(PATH, "text")
    assert cost(*words[2:]) == text


def test_price_lists_are_those_of_the_page() -> None:
    found = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \| (\S+) \|", PAGE, re.MULTILINE)
    assert {name: (each.put, each.get, each.gb_month) for name, each in PRICES.items()} == {
        name: tuple(map(float, prices)) for name, *prices in found
    }
