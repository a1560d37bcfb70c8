# SPDX-License-Identifier: Apache-2.0
"""The keys of /health and of engines behind a gate: where they come from, who is shown them."""

from pathlib import Path
from typing import Any

import pytest

from ecshare.router.options.arguments import parse_arguments
from ecshare.router.options.values import Secret
from ecshare.store.integrity import TOKEN_HEADER, router_token
from tests.ecshare.router.bodies import PNG, chat, picture
from tests.ecshare.router.fake_engine import STATUS_KEY, fleet

KEY = "0123456789abcdef" * 2
TOKEN = router_token(KEY.encode())


async def test_health_tells_strangers_names_only() -> None:
    def named(stage: str, number: int) -> list[dict[str, Any]]:
        return [{"name": f"{stage}-{n + 1}", "healthy": True} for n in range(number)]

    stages = {stage: named(stage, n) for stage, n in (("encode", 1), ("prefill", 1), ("decode", 2))}
    async with fleet(num_d=2) as f:
        for key in (None, "", "wrong", STATUS_KEY[:-1], STATUS_KEY + "x"):
            assert await f.health(key) == (200, {"status": "ok", "stages": stages})
        _, report = await f.health(STATUS_KEY)
        assert report.keys() >= {"answered", "fallbacks"}
        assert [each["url"] for each in report["stages"]["decode"]] == [d.url for d in f.decoders]
        assert {each["in_flight"] for each in report["stages"]["decode"]} == {0}
    async with fleet(num_d=2, status_key=None) as f:
        for key in (None, "", "None"):
            assert await f.health(key) == (200, {"status": "ok", "stages": stages})


@pytest.mark.parametrize(
    ("shown", "is_key"),
    [
        *((shown, True) for shown in (f"Bearer {KEY}", f"bearer  {KEY} ")),
        *((shown, False) for shown in (KEY, f"Basic {KEY}", f"Digest {KEY}", f"Bearer {KEY}x")),
        *((shown, False) for shown in ("Bearer \udcff\u00e9\u20ac", "", None)),
    ],
)
def test_who_shows_it(shown: str | None, is_key: bool) -> None:
    assert Secret(KEY.encode()).matches(shown) is is_key


def test_keys_come_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    monkeypatch.setenv("OUR_KEY", KEY)
    monkeypatch.setenv("WITH_NEWLINE", f"{KEY}\n")
    decoder, file = ["--decoder", "http://d"], f"file:{tmp_path}/key"
    for text in (file, "env:OUR_KEY", "env:WITH_NEWLINE"):
        status_key = parse_arguments([*decoder, "--status-key", text]).status_key
        assert status_key is not None
        assert status_key.matches(f"Bearer {KEY}")
    for text in (file, "env:OUR_KEY"):
        config = parse_arguments([*decoder, "--status-key", text, "--router-key", text])
        assert config.router_token == TOKEN
        assert KEY not in repr(config)


def test_what_is_no_key_is_refused_without_repeating_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short").write_text(KEY[:31])
    monkeypatch.setenv("SHORT", "short")
    monkeypatch.setenv("PADDED", f"{KEY[:31]}\n")
    both = ("--status-key", "--router-key")
    for text, reason, options in (
        (KEY, "env:NAME or file:/path", both),
        (f"key:{KEY}", "env:NAME or file:/path", both),
        ("env:", "env:NAME or file:/path", both),
        ("env:NOT_SET", "env:NOT_SET holds 0 bytes", both),
        ("env:SHORT", "env:SHORT holds 5 bytes; a key is 32", both),
        ("env:PADDED", "env:PADDED holds 31 bytes", both[:1]),  # blanks are not part of it
        (f"file:{tmp_path}/short", "holds 31 bytes", both),
        (f"file:{tmp_path}/none", "cannot be read (No such file", both),
        ("file:a\0b", "cannot be read", both),
    ):
        for option in options:
            with pytest.raises(SystemExit):
                parse_arguments(["--decoder", "http://d", option, text])
            said = capsys.readouterr().err
            assert f"argument {option}: a key" in said
            assert reason in said
            assert KEY[:31] not in said


@pytest.mark.parametrize("token", [TOKEN, ""])
async def test_every_engine_is_shown_the_routers_token_and_never_a_clients(token: str) -> None:
    async with fleet(router_token=token) as f:
        response, _ = await f.post(chat(picture(PNG)), {TOKEN_HEADER: "a client's"})
        assert response.status == 200
        assert TOKEN_HEADER not in response.headers
        for engine in (f.e, f.p, f.d):
            assert [headers.get(TOKEN_HEADER, "") for headers in engine.headers] == [token]
