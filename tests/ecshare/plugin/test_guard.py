# SPDX-License-Identifier: Apache-2.0
"""What raises inside a hook stays inside, and is told once."""

import logging

import pytest
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from ecshare.connector import ECShareConnector
from ecshare.plugin.guard import Guard, guarded
from kvshare.connector import KVShareConnector

# What `guarded` makes has the same code for all hooks.
GUARDED = guarded(lambda: None)(lambda self: None).__code__
# They do nothing, or answer with a constant.
CANNOT_RAISE = {"wait_for_layer_load", "save_kv_layer"}


class Connector:
    """Hooks of every kind; each raises while `is_broken`."""

    def __init__(self) -> None:
        self.is_broken = True
        self.calls: list[str] = []
        self.guard = Guard(lambda: self.calls.append("gave up"))

    def called(self, name: str) -> None:
        self.calls.append(name)
        if self.is_broken:
            raise ValueError(f"the bug in {name}")

    @guarded(lambda: -1)
    def plain(self, number: int) -> int:
        self.called("plain")
        return number

    def promised(self, number: int) -> int:
        if number < 0:
            raise ValueError("no way out either")
        return number + 1

    @guarded(lambda: -1, promised)
    def promising(self, number: int) -> int:
        self.called("promising")
        return number

    @guarded(lambda: -1, goes_on=True)
    def lasting(self, number: int) -> int:
        self.called("lasting")
        return number


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("connector", "bases"),
    [(ECShareConnector, (ECConnectorBase,)), (KVShareConnector, (KVConnectorBase_V1, SupportsHMA))],
)
def test_every_hook_of_vllms_that_is_ours_is_guarded(
    connector: type, bases: tuple[type, ...]
) -> None:
    public = {name for base in bases for name in vars(base) if not name.startswith("_")}
    ours = {
        name: hook
        for name, hook in vars(connector).items()
        if name in public and not isinstance(hook, property | classmethod)
    }
    unguarded = {name for name, hook in ours.items() if hook.__code__ is not GUARDED}
    assert unguarded <= CANNOT_RAISE
    assert len(ours) > 10


def test_the_first_bug_is_logged_with_its_traceback_and_ends_the_half(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connector = Connector()
    assert connector.plain(7) == -1
    assert connector.calls == ["plain", "gave up"]
    assert told(caplog) == [caplog.records[0].message]
    assert "in plain" in caplog.text
    assert "ValueError: the bug in plain" in caplog.text
    connector.is_broken = False
    assert connector.plain(7) == -1
    assert connector.calls == ["plain", "gave up"], "it is not tried again"
    assert connector.lasting(7) == 7
    assert len(told(caplog)) == 1


def test_a_promise_is_kept_by_other_means(caplog: pytest.LogCaptureFixture) -> None:
    connector = Connector()
    assert connector.promising(7) == 8
    assert connector.promising(7) == 8
    assert connector.promising(-7) == -1
    assert connector.calls == ["promising", "gave up"]
    assert len(told(caplog)) == 1


def test_a_hook_that_works_is_only_called() -> None:
    connector = Connector()
    connector.is_broken = False
    assert connector.promising(number=7) == 7
    assert connector.calls == ["promising"]


def test_a_half_that_cannot_let_go_is_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    connector = Connector()

    def raises() -> None:
        raise KeyError("what it holds")

    connector.guard = Guard(raises)
    assert connector.plain(7) == -1
    assert "what it holds" in caplog.text


def test_the_end_of_the_process_is_not_held_up() -> None:
    class Interrupted(Connector):
        def called(self, name: str) -> None:
            raise KeyboardInterrupt

    connector = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        connector.plain(7)
