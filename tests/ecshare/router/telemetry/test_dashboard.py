# SPDX-License-Identifier: Apache-2.0
"""The dashboard: what it shows to whom, and what a browser makes of it."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.ecshare.router.fake_engine import (
    PNG,
    STATUS_KEY,
    Fleet,
    Hanging,
    chat,
    failing,
    fleet,
    hang_up,
    picture,
)
from tests.ecshare.router.telemetry.browser import CHROMIUM, Tab, browser

SOON_S = 10.0
BEARER = {"Authorization": f"Bearer {STATUS_KEY}"}
SECRETS = ("sk-a-clients-key", "what is this", "my-request", "unheard_of", PNG.decode("latin-1"))


async def data(f: Fleet) -> dict[str, Any]:
    async with f.client.get(f.url + "/dashboard/data", headers=BEARER) as response:
        assert response.status == 200
        assert response.headers["Cache-Control"] == "no-store"
        told: dict[str, Any] = await response.json()
        return told


async def test_requests_are_shown_with_their_calls_the_newest_first() -> None:
    async with fleet() as f:
        await f.post(chat(picture(PNG)))
        await f.post({"messages": 1})
        await f.post(chat(picture(PNG), stream=True))
        stream, refused, first = (await data(f))["requests"]
    assert [call["engine"] for call in first["calls"]] == ["encode-1", "prefill-1", "decode-1"]
    assert first["path"] == ["encode", "prefill", "decode"]
    assert first["first_byte_ms"] is None, "it was whole at once"
    for call in first["calls"]:
        assert call["outcome"] == "ok"
        assert 0 <= call["begin_ms"] <= call["first_byte_ms"] <= call["end_ms"] <= first["end_ms"]
    assert (refused["status"], refused["error"]) == ("4xx", "invalid_request")
    assert refused["calls"] == []
    assert stream["avoided"] == ["encode"]
    assert stream["first_byte_ms"] <= stream["end_ms"]


async def test_a_request_on_its_way_is_shown() -> None:
    async with fleet(0, 0) as f:
        f.d.answer = hanging = Hanging()
        asked = asyncio.create_task(f.post(chat()))
        await asyncio.wait_for(hanging.asked.wait(), SOON_S)
        told = await data(f)
        (request,) = told["requests"]
        assert (request["status"], request["end_ms"]) == ("running", None)
        assert [call["outcome"] for call in request["calls"]] == ["running"]
        assert told["stages"]["decode"][0]["in_flight"] == 1
        assert told["in_flight_bytes"] > 0
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_calls_that_failed_are_part_of_the_request() -> None:
    async with fleet(num_d=2) as f:
        f.e.answer = failing(500)
        f.d.answer = hang_up
        for _ in range(2):
            await f.post(chat(picture(PNG)))
        calls = [call for each in (await data(f))["requests"] for call in each["calls"]]
        states = [engine["state"] for engine in (await data(f))["stages"]["decode"]]
    outcomes = {(call["engine"], call["outcome"]) for call in calls}
    assert {("encode-1", "failed"), ("decode-1", "failed"), ("decode-2", "ok")} <= outcomes
    assert states == ["down", "up"]


async def test_the_number_of_requests_and_of_calls_is_bounded() -> None:
    async with fleet(max_items=200) as f:
        pictures = [picture(b"%d" % number) for number in range(150)]
        await f.post(chat(*pictures))
        (request,) = (await data(f))["requests"]
        assert len(request["calls"]) == 100
        for _ in range(110):
            await f.post({"messages": 1})
        assert len((await data(f))["requests"]) == 100


async def test_it_holds_nothing_that_a_client_writes() -> None:
    async with fleet() as f:
        headers = {"Authorization": "Bearer sk-a-clients-key", "x-request-id": "my-request"}
        await f.post(chat(picture(PNG), unheard_of=1), headers=headers)
        text = json.dumps(await data(f))
    assert not [secret for secret in SECRETS if secret in text]


@pytest.mark.parametrize("key", [None, "not the status key"])
async def test_without_the_key_there_is_a_page_and_no_data(key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with fleet() as f:
        async with f.client.get(f.url + "/dashboard/data", headers=headers) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
        async with f.client.get(f.url + "/dashboard", headers=headers) as response:
            assert response.status == 200
            assert f.d.url not in await response.text()


async def test_a_router_without_a_key_shows_nothing_and_says_why() -> None:
    where = "/dashboard/data"
    async with fleet(status_key=None) as f, f.client.get(f.url + where, headers=BEARER) as response:
        assert response.status == 401
        assert "--status-key" in (await response.json())["error"]["message"]


async def test_the_page_needs_nothing_from_elsewhere_and_may_load_nothing() -> None:
    async with fleet() as f, f.client.get(f.url + "/dashboard") as response:
        page, policy = await response.text(), response.headers["Content-Security-Policy"]
    assert not re.findall(r"https?:|//\w|\bsrc=|\bhref=|@import|url\(", page)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for kind in ("style", "script"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules.pop(f"{kind}-src") == f"'sha256-{digest}'"
    assert rules.pop("connect-src") == "'self'"
    assert set(rules.values()) == {"'none'"}
    assert {"default-src", "base-uri", "form-action", "frame-ancestors"} == set(rules)


needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium"
)


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    async with browser(tmp_path) as tab:
        yield tab


async def enter(tab: Tab, key: str) -> None:
    script = "document.getElementById('key').value = {}; document.querySelector('form button')"
    await tab.run(f"({script.format(json.dumps(key)).replace('; ', ', ')}.click())")


async def complaints(tab: Tab) -> list[str]:
    """What the browser has logged, errors and breaches of the page's policy."""
    await tab.run("1")
    kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    return [json.dumps(each) for each in tab.events if each["method"] in kinds]


OPENED = "!document.getElementById('all').hidden"


@pytest.mark.browser
@needs_browser
async def test_a_browser_shows_engines_and_requests_to_who_has_the_key(tab: Tab) -> None:
    async with fleet(num_d=2) as f:
        await f.post(chat(picture(PNG)))
        await f.post(chat(picture(PNG), stream=True))
        f.prefillers[0].healthy = False
        await tab.open(f.url + "/dashboard")
        assert not await tab.run(OPENED)
        await enter(tab, STATUS_KEY)
        await tab.until(OPENED)
        text = await tab.run("document.body.innerText")
        for engine in (f.e, f.p, *f.decoders):
            assert engine.url in text
        assert "50 %\nencodes avoided" in text
        assert "does not answer /health" in text
        assert await tab.run("document.querySelectorAll('.request').length") == 2
        assert await tab.run("document.querySelectorAll('.lane').length") == 5
        assert await tab.run("document.querySelector('.bar').style.width.endsWith('%')")
        await tab.run("document.getElementById('leave').click()")
        assert not await tab.run(OPENED)
        assert f.d.url not in await tab.run("document.documentElement.outerHTML")
        assert await tab.run("sessionStorage.length") == 0
        assert await complaints(tab) == []


@pytest.mark.browser
@needs_browser
async def test_a_browser_shows_models_and_which_engine_drains(tab: Tab) -> None:
    async with fleet(num_d=2) as f:
        await f.post(chat())
        await tab.open(f.url + "/dashboard")
        told = await data(f)
        assert told["stages"]["decode"][1]["models"] == ["m"]
        told["stages"]["decode"][1] |= {"state": "draining", "models": ["base", "adapter"]}
        await tab.run(f"show({json.dumps(told)})")
        await tab.run("open(true)")
        text = await tab.run("document.body.innerText")
        for words in ("draining", "base, adapter"):
            assert words in text


@pytest.mark.browser
@needs_browser
async def test_a_browser_keeps_the_key_out_of_urls_and_asks_nobody_else(tab: Tab) -> None:
    async with fleet() as f:
        await tab.open(f.url + "/dashboard")
        await enter(tab, STATUS_KEY)
        await tab.until(OPENED)
        await tab.open(f.url + "/dashboard")  # again: the tab still has the key
        await tab.until(OPENED)
        sent = [each for each in tab.events if each["method"] == "Network.requestWillBeSent"]
        urls = {each["params"]["request"]["url"] for each in sent}
        assert {f"{f.url}/dashboard", f"{f.url}/dashboard/data"} <= urls
        assert all(url.startswith(f.url) and "?" not in url for url in urls)


@pytest.mark.browser
@needs_browser
async def test_a_wrong_key_is_asked_for_again(tab: Tab) -> None:
    async with fleet() as f:
        await tab.open(f.url + "/dashboard")
        await enter(tab, "not the status key")
        await tab.until("document.getElementById('why').innerText.includes('not the status key')")
        assert not await tab.run(OPENED)
        assert await tab.run("sessionStorage.length") == 0


@pytest.mark.browser
@needs_browser
async def test_text_from_the_router_is_never_html(tab: Tab) -> None:
    markup = "<img src=x onerror=document.title='run'>"
    async with fleet() as f:
        await f.post(chat())
        await tab.open(f.url + "/dashboard")
        hostile = await data(f)
        hostile["stages"]["decode"][0] |= {"name": markup, "url": markup, "state": markup}
        hostile["stages"]["decode"][0]["models"] = [markup]
        hostile["stages"][markup] = []
        hostile["requests"][0] |= {"status": markup, "error": markup, "avoided": [markup]}
        hostile["requests"][0]["calls"][0] |= {"engine": markup, "outcome": markup, "stage": markup}
        await tab.run(f"show({json.dumps(hostile)})")
        await tab.run("open(true)")
        assert markup in await tab.run("document.body.innerText")
        assert await tab.run("document.querySelectorAll('img').length") == 0
        assert await tab.run("document.title") == "ecshare router"


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("dark", [False, True])
async def test_it_fits_narrow_and_wide_screens_light_and_dark(
    tab: Tab, width: int, dark: bool
) -> None:
    async with fleet(num_d=2) as f:
        await f.post(chat(picture(PNG), stream=True))
        await tab.look(width=width, height=800, dark=dark)
        await tab.open(f.url + "/dashboard")
        await enter(tab, STATUS_KEY)
        await tab.until(OPENED)
        assert await tab.run("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        back = await tab.run("getComputedStyle(document.body).backgroundColor")
        ink = await tab.run("getComputedStyle(document.body).color")
        assert (brightness(back) < brightness(ink)) is dark


def brightness(color: str) -> int:
    return sum(int(number) for number in re.findall(r"\d+", color)[:3])
