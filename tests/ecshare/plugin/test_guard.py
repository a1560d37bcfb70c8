# SPDX-License-Identifier: Apache-2.0
"""Exceptions inside a hook do not leave it, and are logged once."""

import logging

import pytest
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from ecshare.connector import ECShareConnector
from ecshare.plugin.guard import Guard, guarded
from kvshare.connector import KVShareConnector

# All functions that `guarded` returns have the same code.
GUARDED = guarded(lambda: None)(lambda self: None).__code__
# Hooks that do nothing or return a constant, and so need no guard.
TRIVIAL_HOOKS = {"wait_for_layer_load", "save_kv_layer"}


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


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("connector", "bases"),
    [(ECShareConnector, (ECConnectorBase,)), (KVShareConnector, (KVConnectorBase_V1, SupportsHMA))],
)
def test_every_overridden_vllm_hook_is_guarded(connector: type, bases: tuple[type, ...]) -> None:
    public = {name for base in bases for name in vars(base) if not name.startswith("_")}
    ours = {
        name: hook
        for name, hook in vars(connector).items()
        if name in public and not isinstance(hook, property | classmethod)
    }
    unguarded = {name for name, hook in ours.items() if hook.__code__ is not GUARDED}
    assert unguarded <= TRIVIAL_HOOKS
    assert len(ours) > 10


def test_first_exception_is_logged_and_disables_the_half(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connector = Connector()
    assert connector.plain(7) == -1
    assert connector.calls == ["plain", "gave up"]
    assert logged_errors(caplog) == [caplog.records[0].message]
    assert "in plain" in caplog.text
    assert "ValueError: the bug in plain" in caplog.text
    connector.is_broken = False
    assert connector.plain(7) == -1
    assert connector.calls == ["plain", "gave up"], "it is not tried again"
    assert connector.lasting(7) == 7
    assert len(logged_errors(caplog)) == 1


def test_fallback_is_called_after_an_exception(caplog: pytest.LogCaptureFixture) -> None:
    connector = Connector()
    assert connector.promising(7) == 8
    assert connector.promising(7) == 8
    assert connector.promising(-7) == -1
    assert connector.calls == ["promising", "gave up"]
    assert len(logged_errors(caplog)) == 1


def test_working_hook_does_not_call_the_fallback() -> None:
    connector = Connector()
    connector.is_broken = False
    assert connector.promising(number=7) == 7
    assert connector.calls == ["promising"]


def test_exception_while_giving_up_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    connector = Connector()

    def raises() -> None:
        raise KeyError("what it holds")

    connector.guard = Guard(raises)
    assert connector.plain(7) == -1
    assert "what it holds" in caplog.text


def test_keyboard_interrupt_is_not_caught() -> None:
    class Interrupted(Connector):
        def called(self, name: str) -> None:
            raise KeyboardInterrupt

    connector = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        connector.plain(7)
