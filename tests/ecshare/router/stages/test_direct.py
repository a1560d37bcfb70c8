# SPDX-License-Identifier: Apache-2.0
"""`--hand-over direct`: D fetches KV from P by a connector beside ours. What P says serves once."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from ecshare.router.api.chat import CHAT
from tests.ecshare.router.answers import Answer, answering, failing, hang_up
from tests.ecshare.router.bodies import PNG, chat, picture, text
from tests.ecshare.router.fake_engine import Fleet, fleet
from tests.ecshare.router.held import soon

OURS = {"num_tokens": 99, "size": 1}
OF_NIXL = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]]}
ASKED_DIRECTLY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "kvshare": {"for_decode": False},
}
AFTER = {"kvshare": {"num_tokens": 7}}


def handing_over(**params: Any) -> Answer:
    return answering(kv_transfer_params=params, usage={"prompt_tokens": 100})


def direct(**options: Any) -> Any:
    return fleet(hand_over="direct", **options)


@pytest.fixture
async def f() -> AsyncIterator[Fleet]:
    async with direct() as made:
        yield made


def params_of(bodies: list[dict[str, Any]]) -> list[Any]:
    return [body.get("kv_transfer_params") for body in bodies]


@pytest.mark.parametrize("stream", [False, True])
async def test_d_gets_after_p_all_that_p_says(f: Fleet, stream: bool) -> None:
    for number in range(2):
        held = f.p.hold(handing_over(**OF_NIXL))
        asked = f.start(chat(picture(PNG), user=str(number), stream=stream))
        await soon(held.asked)
        assert len(f.d.bodies) == number, "D is asked while P computes"
        held.let_go.set()
        response, _ = await asked
        assert response.headers["x-ecshare-path"].endswith("prefill,decode")
    assert params_of(f.p.bodies) == [ASKED_DIRECTLY] * 2
    assert params_of(f.d.bodies) == [OF_NIXL] * 2


async def test_p_is_skipped_for_what_it_has_stored_and_d_gets_our_part_alone(f: Fleet) -> None:
    f.p.answer = handing_over(**OF_NIXL, kvshare=OURS)
    assert [await f.way(chat()) for _ in range(2)] == ["prefill,decode", "decode"]
    assert params_of(f.d.bodies) == [{**OF_NIXL, "kvshare": OURS}, {"kvshare": OURS}]


async def test_p_that_has_stored_too_little_is_asked_again() -> None:
    async with direct(max_new_tokens=8) as f:
        for ours in ({}, {"kvshare": {"num_tokens": 16, "size": 1}}):
            f.p.answer = handing_over(**OF_NIXL, **ours)
            assert [await f.way(chat()) for _ in range(2)] == ["prefill,decode"] * 2


@pytest.mark.parametrize("ours", [{}, {"kvshare": OURS}])
@pytest.mark.parametrize("failure", [failing(503), hang_up])
async def test_second_d_does_not_get_what_serves_once(
    ours: dict[str, Any], failure: Answer
) -> None:
    async with direct(num_d=2) as f:
        f.p.answer = handing_over(**OF_NIXL, **ours)
        f.d.answer = failure
        own = {"kvshare_save": False}  # which does not matter here: P need not store anything
        assert await f.way(chat(kv_transfer_params=own)) == "prefill,decode"
        assert params_of(f.p.bodies) == [{**ASKED_DIRECTLY, **own}]
        assert f.handed_over() == [{**OF_NIXL, **ours, **own}, {**ours, **own}]


async def test_d_that_cannot_be_reached_leaves_all_to_the_next_one() -> None:
    async with direct(decoders_more=("http://127.0.0.1:9",), num_d=1) as f:
        f.p.answer = handing_over(**OF_NIXL)
        for number in range(4):
            assert await f.way(chat(user=str(number))) == "prefill,decode"
        assert params_of(f.d.bodies) == [OF_NIXL] * 4


async def test_p_without_a_connector_beside_ours_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with direct(num_p=2) as f:
        f.prefillers[0].answer = handing_over(kvshare=OURS)
        f.prefillers[1].answer = handing_over(**OF_NIXL)
        for number in range(6):
            assert await f.way(chat(text(str(number)))) == "prefill,decode"
        assert all(engine.bodies for engine in f.prefillers)
        (said,) = [each for each in caplog.messages if "--hand-over direct" in each]
        assert f.prefillers[0].url in said


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (chat(n=2), CHAT),
        (chat(use_beam_search=True), CHAT),
        ({"model": "m", "prompt": ["a", "b"]}, "/v1/completions"),
    ],
)
async def test_several_answers_or_prompts_go_by_way_of_the_store(
    f: Fleet, body: dict[str, Any], path: str
) -> None:
    """Each would fetch the KV from P, which frees its memory after the first."""
    await f.way(body, path)
    assert params_of(f.p.bodies) == [{"kvshare": {"for_decode": True}}]
    assert params_of(f.d.bodies) == [None if "prompt" in body else AFTER]


@pytest.mark.parametrize(
    "params", [OF_NIXL, {"do_remote_decode": True}, {"remote_host": "10.0.0.1"}]
)
async def test_client_cannot_name_another_source(f: Fleet, params: dict[str, Any]) -> None:
    """NIXL would read from any host that it names."""
    assert (await f.error(chat(kv_transfer_params=params)))[0] == 400
    assert not f.p.bodies + f.d.bodies
