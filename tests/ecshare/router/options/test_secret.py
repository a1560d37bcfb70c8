# SPDX-License-Identifier: Apache-2.0
"""The key that /health is asked with."""

from pathlib import Path

import pytest

from ecshare.router.options.arguments import parse_arguments
from ecshare.router.options.secret import Secret
from ecshare.router.options.values import key
from tests.ecshare.router.fake_engine import STATUS_KEY, fleet

KEY = "0123456789abcdef" * 2
LOAD = {"answered", "fallbacks"}


async def test_health_tells_strangers_names_only() -> None:
    async with fleet(num_d=2) as f:
        for key in (None, "", "wrong", STATUS_KEY[:-1], STATUS_KEY + "x"):
            status, report = await f.health(key)
            assert status == 200
            assert report == {
                "status": "ok",
                "stages": {
                    "encode": [{"name": "encode-1", "healthy": True}],
                    "prefill": [{"name": "prefill-1", "healthy": True}],
                    "decode": [{"name": f"decode-{number}", "healthy": True} for number in (1, 2)],
                },
            }
        _, report = await f.health(STATUS_KEY)
        assert report.keys() >= LOAD
        assert [each["url"] for each in report["stages"]["decode"]] == [d.url for d in f.decoders]
        assert {each["in_flight"] for each in report["stages"]["decode"]} == {0}


async def test_without_a_key_there_is_nothing_to_guess() -> None:
    async with fleet(status_key=None) as f:
        for key in (None, "", "None"):
            assert not (await f.health(key))[1].keys() & LOAD


def test_key_from_the_environment_may_end_in_a_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_KEY", f"{KEY}\n")
    assert key("env:OUR_KEY").matches(f"Bearer {KEY}")


def test_blanks_do_not_make_a_short_key_long_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PADDED", f"{KEY[:31]}\n")
    with pytest.raises(SystemExit):
        parse_arguments(["--decoder", "http://d", "--status-key", "env:PADDED"])
    assert "env:PADDED holds 31 bytes; a key is 32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shown", "is_key"),
    [
        (f"Bearer {KEY}", True),
        (f"bearer  {KEY} ", True),
        (KEY, False),
        (f"Basic {KEY}", False),
        (f"Digest {KEY}", False),
        (f"Bearer {KEY}x", False),
        ("Bearer \udcff\u00e9\u20ac", False),
        ("", False),
        (None, False),
    ],
)
def test_who_shows_it(shown: str | None, is_key: bool) -> None:
    assert Secret(KEY.encode()).matches(shown) is is_key


def test_where_it_is_read_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    monkeypatch.setenv("ROUTER_KEY", KEY)
    for text in (f"file:{file}", "env:ROUTER_KEY"):
        arguments = ["--decoder", "http://d", "--status-key", text]
        config = parse_arguments(arguments)
        assert config.status_key is not None
        assert config.status_key.matches(f"Bearer {KEY}")
        assert KEY not in repr(config)


def test_what_is_no_key_is_refused_without_repeating_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short").write_text(KEY[:31])
    monkeypatch.setenv("SHORT", "short")
    for text, reason in (
        (KEY, "env:NAME or file:/path"),
        (f"key:{KEY}", "env:NAME or file:/path"),
        ("env:", "env:NAME or file:/path"),
        ("env:NOT_SET", "env:NOT_SET holds 0 bytes"),
        ("env:SHORT", "env:SHORT holds 5 bytes; a key is 32"),
        (f"file:{tmp_path}/short", "holds 31 bytes"),
        (f"file:{tmp_path}/none", "cannot be read (No such file"),
        ("file:a\0b", "cannot be read"),
    ):
        for option in ("--status-key", "--router-key"):
            with pytest.raises(SystemExit):
                parse_arguments(["--decoder", "http://d", option, text])
            said = capsys.readouterr().err
            assert f"argument {option}: a key" in said
            assert reason in said
            assert KEY[:31] not in said
