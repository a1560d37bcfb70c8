# SPDX-License-Identifier: Apache-2.0
"""`--hand-over direct`: D fetches KV from P by a connector beside ours. What P says serves once."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from tests.ecshare.router.fake_engine import (
    PNG,
    Answer,
    Fleet,
    Held,
    chat,
    failing,
    fleet,
    hang_up,
    picture,
)
from tests.waiting import until

TOKENS = 100
OURS = {"num_tokens": TOKENS - 1, "size": 1}
OF_NIXL = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]]}
ASKED_DIRECTLY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "kvshare": {"for_decode": False},
}


def handing_over(**params: Any) -> Answer:
    async def answer(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        usage = {"prompt_tokens": TOKENS}
        return web.json_response({"kv_transfer_params": params, "usage": usage})

    return answer


def direct(**options: Any) -> Any:
    return fleet(hand_over="direct", **options)


def params_of(bodies: list[dict[str, Any]]) -> list[Any]:
    return [body.get("kv_transfer_params") for body in bodies]


async def ask(f: Fleet, *parts: Any, **fields: Any) -> str:
    """Ask, and return the stages that worked for the answer."""
    response, _ = await f.post(chat(*parts, **fields))
    assert response.status == 200
    return str(response.headers["x-ecshare-path"])


@pytest.mark.parametrize("stream", [False, True])
async def test_d_gets_after_p_all_that_p_says(stream: bool) -> None:
    async with direct() as f:
        for number in range(2):
            f.p.answer = held = Held(handing_over(**OF_NIXL))
            asked = asyncio.create_task(f.post(chat(picture(PNG), user=str(number), stream=stream)))
            await until(held.asked.is_set)
            assert len(f.d.bodies) == number, "D is asked while P computes"
            held.let_go.set()
            response, _ = await asked
            assert response.headers["x-ecshare-path"].endswith("prefill,decode")
        assert params_of(f.p.bodies) == [ASKED_DIRECTLY] * 2
        assert params_of(f.d.bodies) == [OF_NIXL] * 2


async def test_p_is_skipped_for_what_it_has_stored_and_d_gets_our_part_alone() -> None:
    async with direct() as f:
        f.p.answer = handing_over(**OF_NIXL, kvshare=OURS)
        assert await ask(f) == "prefill,decode"
        assert await ask(f) == "decode"
        assert params_of(f.d.bodies) == [{**OF_NIXL, "kvshare": OURS}, {"kvshare": OURS}]


async def test_p_that_has_stored_too_little_is_asked_again() -> None:
    async with direct(max_new_tokens=8) as f:
        for ours in ({}, {"kvshare": {"num_tokens": 16, "size": 1}}):
            f.p.answer = handing_over(**OF_NIXL, **ours)
            for _ in range(2):
                assert await ask(f) == "prefill,decode"


@pytest.mark.parametrize("ours", [{}, {"kvshare": OURS}])
@pytest.mark.parametrize("failure", [failing(503), hang_up])
async def test_second_d_does_not_get_what_serves_once(
    ours: dict[str, Any], failure: Answer
) -> None:
    async with direct(num_d=2) as f:
        f.p.answer = handing_over(**OF_NIXL, **ours)
        first, second = f.decoders
        first.answer = failure
        own = {"kvshare_save": False}  # which does not matter here: P need not store anything
        assert await ask(f, kv_transfer_params=own) == "prefill,decode"
        assert params_of(f.p.bodies) == [{**ASKED_DIRECTLY, **own}]
        assert params_of(first.bodies) == [{**OF_NIXL, **ours, **own}]
        assert params_of(second.bodies) == [{**ours, **own}]


async def test_d_that_cannot_be_reached_leaves_all_to_the_next_one() -> None:
    async with direct(decoders_more=("http://127.0.0.1:9",), num_d=1) as f:
        f.p.answer = handing_over(**OF_NIXL)
        for number in range(4):
            assert await ask(f, user=str(number)) == "prefill,decode"
        assert params_of(f.d.bodies) == [OF_NIXL] * 4


async def test_p_without_a_connector_beside_ours_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with direct(num_p=2) as f:
        f.prefillers[0].answer = handing_over(kvshare=OURS)
        f.prefillers[1].answer = handing_over(**OF_NIXL)
        for number in range(6):
            assert await ask(f, {"type": "text", "text": str(number)}) == "prefill,decode"
        assert all(f.prefillers[number].bodies for number in range(2))
        (said,) = [each for each in caplog.messages if "--hand-over direct" in each]
        assert f.prefillers[0].url in said


@pytest.mark.parametrize("fields", [{"n": 2}, {"use_beam_search": True}])
async def test_several_answers_to_one_prompt_go_by_way_of_the_store(fields: dict[str, Any]) -> None:
    """Each would fetch the KV from P, which frees its memory after the first."""
    async with direct() as f:
        await ask(f, **fields)
        assert params_of(f.p.bodies) == [{"kvshare": {"for_decode": True}}]


async def test_several_prompts_go_by_way_of_the_store() -> None:
    async with direct() as f:
        response, _ = await f.post({"model": "m", "prompt": ["a", "b"]}, path="/v1/completions")
        assert response.status == 200
        assert params_of(f.p.bodies) == [{"kvshare": {"for_decode": True}}]
        assert params_of(f.d.bodies) == [None]


@pytest.mark.parametrize(
    "params", [OF_NIXL, {"do_remote_decode": True}, {"remote_host": "10.0.0.1"}]
)
async def test_client_cannot_name_another_source(params: dict[str, Any]) -> None:
    """NIXL would read from any host that it names."""
    async with direct() as f:
        response, _ = await f.post(chat(kv_transfer_params=params))
        assert response.status == 400
        assert not f.p.bodies + f.d.bodies
