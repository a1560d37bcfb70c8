# SPDX-License-Identifier: Apache-2.0
"""Which engines there are after a file and an operator have had their say."""

import pytest

from ecshare.router.engines import Stage
from ecshare.router.roster import ChangeError, Given, Roster


def given(e: str = "", p: str = "", d: str = "d") -> Given:
    return Given({Stage.ENCODE: tuple(e), Stage.PREFILL: tuple(p), Stage.DECODE: tuple(d)})


def engines(roster: Roster) -> dict[str, str]:
    return {stage[0]: "".join(roster.urls(stage)) for stage in Stage}


def test_what_is_added_stays_whatever_is_given() -> None:
    roster = Roster(given())
    roster.add(Stage.DECODE, "x", None)
    roster.add(Stage.ENCODE, "y", frozenset("m"))
    assert engines(roster) == {"e": "y", "p": "", "d": "dx"}
    roster.give(given(d="c"))
    assert engines(roster) == {"e": "y", "p": "", "d": "cx"}
    assert roster.assigned_models == {"y": frozenset("m")}
    roster.remove("y")
    assert engines(roster) == {"e": "", "p": "", "d": "cx"}
    assert roster.assigned_models == {}


def test_an_added_engine_that_is_given_later_goes_with_the_given() -> None:
    roster = Roster(given())
    roster.add(Stage.DECODE, "x", frozenset("m"))
    roster.give(given(d="dx"))
    assert engines(roster)["d"] == "dx"
    assert roster.assigned_models == {}, "the file says what it serves"
    roster.give(given(d="d"))
    assert engines(roster)["d"] == "d"


def test_an_added_engine_may_be_given_for_another_stage() -> None:
    roster = Roster(given())
    roster.add(Stage.PREFILL, "x", None)
    roster.give(given(d="dx"))
    assert engines(roster) == {"e": "", "p": "", "d": "dx"}


def test_a_removed_engine_stays_out_until_it_is_given_anew() -> None:
    roster = Roster(given(d="cd"))
    roster.remove("c")
    roster.give(given(d="cde"))
    assert engines(roster)["d"] == "de"
    roster.give(given(d="d"))
    roster.give(given(d="cd"))
    assert engines(roster)["d"] == "cd"


def test_a_drained_engine_stays_drained_until_it_is_added_again() -> None:
    roster = Roster(given(d="cd"))
    roster.drain("c")
    roster.give(given(d="dc"))
    assert roster.draining == {"c"}
    roster.add(Stage.DECODE, "c", None)
    assert roster.draining == set()
    roster.drain("c")
    roster.give(given(d="d"))
    roster.give(given(d="cd"))
    assert roster.draining == set()


def test_a_removed_engine_comes_back_when_it_is_added() -> None:
    roster = Roster(given(d="cd"))
    roster.drain("c")
    roster.remove("c")
    roster.add(Stage.DECODE, "c", None)
    assert engines(roster)["d"] == "cd"
    assert roster.draining == set()


def test_one_decode_engine_remains() -> None:
    roster = Roster(given(p="p", d="cd"))
    roster.drain("c")
    for change in (roster.drain, roster.remove):
        with pytest.raises(ChangeError, match="d is the last decode engine"):
            change("d")
    roster.remove("c")
    with pytest.raises(ChangeError, match="d is the last decode engine"):
        roster.remove("d")
    roster.remove("p")
    assert engines(roster) == {"e": "", "p": "", "d": "d"}


def test_a_change_that_cannot_be_is_refused() -> None:
    roster = Roster(given(e="e", d="d"))
    for change in (roster.drain, roster.remove):
        with pytest.raises(ChangeError, match="there is no engine x") as caught:
            change("x")
        assert not caught.value.is_known
    with pytest.raises(ChangeError, match="e is already an engine of the encode stage"):
        roster.add(Stage.DECODE, "e", None)
    roster.add(Stage.PREFILL, "x", None)
    with pytest.raises(ChangeError, match="x is already an engine of the prefill stage"):
        roster.add(Stage.DECODE, "x", None)
    roster.remove("e")
    with pytest.raises(ChangeError, match="e is already an engine of the encode stage"):
        roster.add(Stage.DECODE, "e", None)
    with pytest.raises(ChangeError, match="was given") as caught:
        roster.add(Stage.DECODE, "d", frozenset("m"))
    assert caught.value.field == "models"
    assert engines(roster) == {"e": "", "p": "x", "d": "d"}
