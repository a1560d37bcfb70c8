# SPDX-License-Identifier: Apache-2.0
"""The dashboard: what it shows, and what a browser makes of it."""

import gc
import json
import re
from typing import Any

import pytest

from ecshare.router.http.context import EngineCall
from tests.ecshare.router import answers, held
from tests.ecshare.router.bodies import PNG, chat, picture
from tests.ecshare.router.fake_engine import STATUS_KEY, Fleet, fleet
from tests.ecshare.router.telemetry.asking import get, on_its_way, told
from tests.ecshare.router.telemetry.browser import Tab

DATA = "/dashboard/data"
IS_OPEN = "!document.getElementById('all').hidden"


async def test_requests_are_shown_with_their_calls_the_newest_first(f: Fleet) -> None:
    await f.post(chat(picture(PNG)))
    await f.post({"messages": 1})
    await f.post(chat(picture(PNG), stream=True))
    assert (await get(f, DATA))[0].headers["Cache-Control"] == "no-store"
    stream, refused, first = (await told(f, DATA))["requests"]
    assert [call["engine"] for call in first["calls"]] == ["encode-1", "prefill-1", "decode-1"]
    assert first["path"] == ["encode", "prefill", "decode"]
    assert first["first_byte_ms"] is None, "it was whole at once"
    for call in first["calls"]:
        assert call["outcome"] == "ok"
        assert 0 <= call["begin_ms"] <= call["first_byte_ms"] <= call["end_ms"] <= first["end_ms"]
    assert (refused["status"], refused["error"], refused["calls"]) == ("4xx", "invalid_request", [])
    assert stream["avoided"] == ["encode"]
    assert stream["first_byte_ms"] <= stream["end_ms"]


async def test_a_request_on_its_way_is_shown(f: Fleet) -> None:
    f.d.answer = hanging = held.Hanging()
    async with on_its_way(f, hanging, chat()):
        shown = await told(f, DATA)
    (request,) = shown["requests"]
    assert (request["status"], request["end_ms"]) == ("running", None)
    assert [call["outcome"] for call in request["calls"]] == ["ok", "running"]
    assert shown["stages"]["decode"][0]["in_flight"] == 1
    assert shown["in_flight_bytes"] > 0


async def test_calls_that_failed_are_part_of_the_request() -> None:
    async with fleet(num_d=2) as f:
        f.e.answer = answers.failing(500)
        f.d.answer = answers.hang_up
        for _ in range(2):
            await f.post(chat(picture(PNG)))
        shown = await told(f, DATA)
    calls = [call for each in shown["requests"] for call in each["calls"]]
    outcomes = {(call["engine"], call["outcome"]) for call in calls}
    assert {("encode-1", "failed"), ("decode-1", "failed"), ("decode-2", "ok")} <= outcomes
    assert [engine["state"] for engine in shown["stages"]["decode"]] == ["down", "up"]


async def test_the_number_of_requests_and_of_calls_is_bounded() -> None:
    def num_kept() -> int:
        gc.collect()
        return sum(type(each) is EngineCall for each in gc.get_objects())

    num_before = num_kept()
    async with fleet(max_items=200) as f:
        await f.post(chat(*(picture(b"%d" % number) for number in range(150))))
        (request,) = (await told(f, DATA))["requests"]
        assert len(request["calls"]) == 100
        f.d.answer = hanging = held.Hanging()
        async with on_its_way(f, hanging, chat()):
            for _ in range(110):
                await f.post({"messages": 1})
            shown = (await told(f, DATA))["requests"]
            assert [each["status"] for each in shown] == ["4xx"] * 100, "the latest"
            assert num_kept() <= num_before + 2, "those of the request on its way"


# --- in a browser ---


async def enter(tab: Tab, f: Fleet, key: str = STATUS_KEY, until: str = IS_OPEN) -> None:
    """Open the page and type a key in."""
    await tab.open(f.url + "/dashboard")
    assert not await tab.run(IS_OPEN)
    typed = f"document.getElementById('key').value = {json.dumps(key)}"
    await tab.run(f"({typed}, document.querySelector('form button').click())")
    await tab.until(until)


async def show(tab: Tab, data: dict[str, Any]) -> str:
    """Have the page show these data; returns its text."""
    await tab.run(f"show({json.dumps(data)})")
    await tab.run("open(true)")
    text: str = await tab.run("document.body.innerText")
    return text


@pytest.mark.browser
async def test_a_browser_shows_engines_and_requests_to_who_has_the_key(tab: Tab) -> None:
    async with fleet(num_d=2) as f:
        await f.post(chat(picture(PNG)))
        await f.post(chat(picture(PNG), stream=True))
        f.p.healthy = False
        await enter(tab, f)
        text = await tab.run("document.body.innerText")
        for engine in (f.e, f.p, *f.decoders):
            assert engine.url in text
        assert "50 %\nencodes avoided" in text
        assert "does not answer /health" in text
        assert await tab.run("document.querySelectorAll('.request').length") == 2
        assert await tab.run("document.querySelectorAll('.lane').length") == 5
        assert await tab.run("document.querySelector('.bar').style.width.endsWith('%')")
        await tab.run("document.getElementById('leave').click()")
        assert not await tab.run(IS_OPEN)
        assert f.d.url not in await tab.run("document.documentElement.outerHTML")
        assert await tab.run("sessionStorage.length") == 0
    logged = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    assert [each for each in tab.events if each["method"] in logged] == []


@pytest.mark.browser
async def test_a_browser_shows_models_and_which_engine_drains(tab: Tab) -> None:
    async with fleet(num_d=2) as f:
        await f.post(chat())
        await tab.open(f.url + "/dashboard")
        data = await told(f, DATA)
        assert data["stages"]["decode"][1]["models"] == ["m"]
        data["stages"]["decode"][1] |= {"state": "draining", "models": ["base", "adapter"]}
        text = await show(tab, data)
        for words in ("draining", "base, adapter"):
            assert words in text


@pytest.mark.browser
async def test_a_browser_keeps_the_key_out_of_urls_and_asks_nobody_else(tab: Tab, f: Fleet) -> None:
    await enter(tab, f)
    await tab.open(f.url + "/dashboard")  # again: the tab still has the key
    await tab.until(IS_OPEN)
    sent = [each for each in tab.events if each["method"] == "Network.requestWillBeSent"]
    urls = {each["params"]["request"]["url"] for each in sent}
    assert {f"{f.url}/dashboard", f"{f.url}/dashboard/data"} <= urls
    assert all(url.startswith(f.url) and "?" not in url for url in urls)


@pytest.mark.browser
async def test_a_wrong_key_is_asked_for_again(tab: Tab, f: Fleet) -> None:
    said = "document.getElementById('why').innerText.includes('not the status key')"
    await enter(tab, f, "not the status key", until=said)
    assert not await tab.run(IS_OPEN)
    assert await tab.run("sessionStorage.length") == 0


@pytest.mark.browser
async def test_text_from_the_router_is_never_html(tab: Tab, f: Fleet) -> None:
    markup = "<img src=x onerror=document.title='run'>"
    await f.post(chat())
    await tab.open(f.url + "/dashboard")
    hostile = await told(f, DATA)
    engine, request = hostile["stages"]["decode"][0], hostile["requests"][0]
    engine |= {"name": markup, "url": markup, "state": markup, "models": [markup]}
    hostile["stages"][markup] = []
    request |= {"status": markup, "error": markup, "avoided": [markup]}
    request["calls"][0] |= {"engine": markup, "outcome": markup, "stage": markup}
    assert markup in await show(tab, hostile)
    assert await tab.run("document.querySelectorAll('img').length") == 0
    assert await tab.run("document.title") == "ecshare router"


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("dark", [False, True])
async def test_it_fits_narrow_and_wide_screens_light_and_dark(
    tab: Tab, width: int, dark: bool
) -> None:
    async with fleet(num_d=2) as f:
        await f.post(chat(picture(PNG), stream=True))
        await tab.look(width=width, height=800, dark=dark)
        await enter(tab, f)
        assert await tab.run("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        back = await tab.run("getComputedStyle(document.body).backgroundColor")
        ink = await tab.run("getComputedStyle(document.body).color")
        assert (brightness(back) < brightness(ink)) is dark


def brightness(color: str) -> int:
    return sum(int(number) for number in re.findall(r"\d+", color)[:3])
