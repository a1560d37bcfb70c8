# SPDX-License-Identifier: Apache-2.0
"""Engines of one stage that serve different models and LoRA adapters."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from ecshare.router.fleet import models
from ecshare.router.types import Stage
from tests.ecshare.router.answers import encoded, failing
from tests.ecshare.router.bodies import PNG, chat, picture
from tests.ecshare.router.fake_engine import FakeEngine, Fleet, answer_all, fleet
from tests.ecshare.router.held import Held
from tests.waiting import until

GOOD = {"Authorization": "Bearer right"}
BAD = {"Authorization": "Bearer wrong"}


@pytest.fixture(autouse=True)
def _lists_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is."""
    monkeypatch.setattr(models, "MAX_WAIT_S", 60.0)


def ask(model: str | None, *parts: object, **fields: Any) -> dict[str, Any]:
    return chat(*parts, **fields) | {"model": model}


def models_of(engines: list[FakeEngine]) -> list[list[str]]:
    """Return the models that each engine was asked for."""
    return [[body["model"] for body in engine.bodies] for engine in engines]


async def error_of(f: Fleet, body: object, headers: dict[str, str] | None = None) -> dict[str, Any]:
    response, said = await f.post(body, headers)
    error: dict[str, Any] = json.loads(said)["error"]
    return error | {"status": response.status}


@asynccontextmanager
async def two_models(**options: Any) -> AsyncIterator[Fleet]:
    """Two engines of each stage: one serves `a`, the other `b`."""
    async with fleet(2, 2, 2, **options) as f:
        for stage in (f.encoders, f.prefillers, f.decoders):
            stage[0].models, stage[1].models = ("a",), ("b",)
        yield f


@asynccontextmanager
async def adapted(**options: Any) -> AsyncIterator[Fleet]:
    """Two engines of each stage that serve `a`; one P and one D also have the adapter `a-1`."""
    async with fleet(2, 2, 2, **options) as f:
        for engine in (*f.encoders, *f.prefillers, *f.decoders):
            engine.models = ("a",)
        f.p.adapters = f.d.adapters = {"a-1": "a"}
        yield f


# --- where requests go ---


@pytest.mark.parametrize("balance", ["load", "affinity"])
async def test_each_stage_is_one_that_serves_the_model(balance: str) -> None:
    async with two_models(balance=balance) as f:
        for number in range(4):
            for model in "ab":
                body = ask(model, picture(PNG + bytes([number])))
                assert (await f.post(body))[0].status == 200
        for stage in (f.encoders, f.prefillers, f.decoders):
            assert models_of(stage) == [["a"] * 4, ["b"] * 4]


async def test_another_engine_that_is_asked_serves_the_model_too() -> None:
    async with fleet(0, 0, 3) as f:
        f.decoders[0].models = f.decoders[2].models = ("a",)
        f.decoders[1].models = ("b",)
        f.decoders[0].answer = failing(500)
        for _ in range(2):
            assert (await f.post(ask("a")))[0].status == 200
        for status in (500, 503, 503):
            f.decoders[1].answer = failing(status)
            assert (await f.post(ask("b")))[0].status == status
        assert (await f.post(ask("a")))[0].status == 200
        assert [{*names} for names in models_of(f.decoders)] == [{"a"}, {"b"}, {"a"}]
        assert len(f.decoders[1].bodies) == 3, "also while it is down"


async def test_a_stage_that_does_not_serve_the_model_is_left_out() -> None:
    async with fleet(1, 1, 2) as f:
        f.e.models = f.p.models = f.d.models = ("a",)
        f.decoders[1].models = ("b",)
        response, _ = await f.post(ask("b", picture(PNG)))
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
        response, _ = await f.post(ask("a", picture(PNG)))
        assert response.headers["x-ecshare-path"] == "encode,prefill,decode"
        assert (await f.health())[1]["fallbacks"] == 0


async def test_what_is_known_of_one_model_is_not_used_for_another() -> None:
    """The same picture and the same prompt, at the same moment and later."""
    async with two_models() as f:
        answer_all(f.encoders, held := Held(encoded))
        bodies = [ask(model, picture(PNG)) for model in "ab"]
        answers = [asyncio.create_task(f.post(body)) for body in bodies]
        await until(lambda: models_of(f.encoders) == [["a"], ["b"]])
        held.let_go.set()
        for each in answers:
            assert (await each)[0].headers["x-ecshare-path"] == "encode,prefill,decode"
        for body in bodies:
            assert (await f.post(body))[0].headers["x-ecshare-avoided"] == "encode"
        for stage in (f.encoders, f.prefillers, f.decoders):
            assert [{*names} for names in models_of(stage)] == [{"a"}, {"b"}]
        assert models_of(f.encoders) == [["a"], ["b"]]


async def test_a_stored_prompt_is_stored_for_its_model() -> None:
    async def stores(http: web.Request, body: dict[str, Any]) -> web.Response:
        said = {"kv_transfer_params": {"kvshare": {"num_tokens": 6}}}
        return web.json_response(said | {"usage": {"prompt_tokens": 7}})

    async with two_models() as f:
        answer_all(f.prefillers, stores)
        for _ in range(2):
            for model in "ab":
                await f.post(ask(model))
        assert models_of(f.prefillers) == [["a"], ["b"]]
        assert models_of(f.decoders) == [["a"] * 2, ["b"] * 2]


# --- adapters ---


@pytest.mark.parametrize(
    ("option", "listed", "encoded"),
    [
        ("listed", {}, [[], []]),
        ("base", {"a-1": "a"}, [[], ["a-1"] * 2]),
        ("base", {}, [["a"], ["a"]]),
    ],
    ids=["no encoder is guessed", "one lists the adapter", "those of its base model"],
)
async def test_an_adapter_is_a_model_of_its_own_but_may_share_encoders(
    option: str, listed: dict[str, str], encoded: list[list[str]]
) -> None:
    async with adapted(adapter_encoders=option) as f:
        f.encoders[1].adapters = listed
        pictures = [picture(PNG + bytes([number])) for number in range(2)]
        path = "encode,prefill,decode" if any(encoded) else "prefill,decode"
        for each in pictures:
            assert (await f.post(ask("a-1", each)))[0].headers["x-ecshare-path"] == path
        assert models_of(f.encoders) == encoded
        assert models_of(f.prefillers) == models_of(f.decoders) == [["a-1"] * 2, []]
        assert ("image_url" in json.dumps(f.d.bodies)) != any(encoded), "otherwise P and D encode"
        response, _ = await f.post(ask("a", pictures[0]))
        is_shared = encoded == [["a"], ["a"]]
        assert (response.headers.get("x-ecshare-avoided") == "encode") == is_shared


async def test_an_adapter_that_is_loaded_is_found_and_one_that_is_unloaded_moves() -> None:
    async with adapted() as f:
        assert (await f.post(ask("a-2")))[0].status == 404
        f.d.adapters = {"a-2": "a"}
        f.clock.now_s += 1
        assert (await f.post(ask("a-2")))[0].status == 200
        f.decoders[1].adapters, f.d.adapters = {"a-2": "a"}, {}
        f.clock.now_s += 5
        await f.post(ask("a"))
        _, second = f.router.pools[Stage.DECODE]
        await until(lambda: sorted(second.models or ()) == ["a", "a-2"])
        assert (await f.post(ask("a-2")))[0].status == 200
        assert "a-2" in models_of(f.decoders)[1]


async def test_an_engine_that_has_unloaded_an_adapter_a_moment_ago_is_not_the_end() -> None:
    async with adapted() as f:
        f.prefillers[1].adapters = f.decoders[1].adapters = {"a-1": "a"}
        assert (await f.post(ask("a-1")))[0].status == 200
        f.p.answer = f.d.answer = failing(404)
        for number in range(2):
            response, _ = await f.post(ask("a-1", {"type": "text", "text": str(number)}))
            assert (response.status, response.headers["x-ecshare-path"]) == (200, "prefill,decode")
        f.decoders[1].answer = failing(404)
        response, body = await f.post(ask("a-1"))
        assert (response.status, json.loads(body)["error"]["message"]) == (404, "engine says no")


# --- what clients are told ---


@pytest.mark.parametrize(
    ("model", "status", "code", "message"),
    [
        ("c", 404, "model_not_found", "The model `c` does not exist."),
        (None, 400, "model_needed", "`model` is missing, and engines serve several."),
    ],
)
async def test_what_names_none_of_several_models_is_refused_with_their_names(
    model: str | None, status: int, code: str, message: str
) -> None:
    async with two_models() as f:
        f.d.adapters = {"a-1": "a"}
        error = await error_of(f, ask(model, picture(PNG)))
        assert (error["status"], error["param"], error["code"]) == (status, "model", code)
        assert error["message"] == f"{message} There is: `a`, `a-1`, `b`."
        for stage in (f.encoders, f.prefillers, f.decoders):
            assert models_of(stage) == [[], []]
        f.d.models = tuple(f"m{number:02}" for number in range(23))
        f.clock.now_s += 1
        message = (await error_of(f, ask("c")))["message"]
        assert "`m00`" in message
        assert message.endswith("`m17` and 5 more.")


async def test_who_the_engines_do_not_serve_learns_no_names() -> None:
    async with two_models() as f:
        await f.post(ask("a"), GOOD)
        for engine in f.decoders:
            engine.key = GOOD["Authorization"]
        for body in (ask("c"), ask(None)):
            response, said = await f.post(body, BAD)
            assert (response.status, said) == (401, b'{"error": "who is this?"}')
            assert "`a`" in (await error_of(f, body, GOOD))["message"]


async def test_the_list_is_what_all_decode_engines_serve() -> None:
    async with two_models() as f:
        f.d.adapters = {"a-1": "a"}
        f.decoders[1].models = ("b", "a")
        f.p.models = f.e.models = ("other",)
        async with f.client.get(f.url + "/v1/models") as response:
            listed = await response.json()
        assert (response.status, listed["object"]) == (200, "list")
        assert sorted(card["id"] for card in listed["data"]) == ["a", "a-1", "b"]
        assert {"id": "a-1", "parent": "a"} in listed["data"]


async def test_a_request_that_names_no_model_gets_the_one_there_is() -> None:
    async with adapted(adapter_encoders="base") as f:
        for name in ("a", None):
            assert (await f.post(ask(name, picture(PNG))))[0].status == 200
        nameless = ask(None)
        del nameless["model"]
        assert (await f.post(nameless))[0].status == 200
        assert sum(models_of(f.decoders), []) == ["a"] * 3
        assert sum(models_of(f.encoders), []) == ["a"], "it is the same picture for both"


# --- what operators are told ---


async def test_health_shows_the_models_and_metrics_no_name_of_a_client() -> None:
    async with two_models() as f:
        for model in ("a", "b", "a-model-of-a-client"):
            await f.post(ask(model))
        stages = (await f.health())[1]["stages"]
        for stage in stages.values():
            assert [engine["models"] for engine in stage] == [["a"], ["b"]]
        assert "models" not in (await f.health(key=None))[1]["stages"]["decode"][0]
        headers = {"Authorization": "Bearer a key to all that /health tells"}
        async with f.client.get(f.url + "/metrics", headers=headers) as response:
            assert response.status == 200
            assert "a-model-of-a-client" not in await response.text()
