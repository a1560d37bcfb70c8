# SPDX-License-Identifier: Apache-2.0
"""The key that a router shares with engines behind a gate: where it comes from, who is shown it."""

from pathlib import Path

import pytest

from ecshare.router.options.arguments import parse_arguments
from ecshare.store.integrity import TOKEN_HEADER, router_token
from tests.ecshare.router.fake_engine import fleet

KEY = "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2"
TOKEN = router_token(KEY.encode())
CHAT = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "text", "text": "?"},
            ],
        }
    ]
}


@pytest.mark.parametrize("token", [TOKEN, ""])
async def test_every_engine_is_shown_the_routers_token_and_never_a_clients(token: str) -> None:
    async with fleet(router_token=token) as f:
        response, _ = await f.post(CHAT, {TOKEN_HEADER: "a client's"})
        assert response.status == 200
        assert TOKEN_HEADER not in response.headers
        for engine in (f.e, f.p, f.d):
            assert [headers.get(TOKEN_HEADER, "") for headers in engine.headers] == [token]


def test_the_key_comes_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_KEY", KEY)
    (tmp_path / "key").write_text(KEY + "\n")
    for text in ("env:OUR_KEY", f"file:{tmp_path}/key"):
        config = parse_arguments(["--decoder", "http://d:3", "--router-key", text])
        assert config.router_token == TOKEN
