# SPDX-License-Identifier: Apache-2.0
"""How much work a request is taken for, and which requests have something in common."""

import json
from typing import Any

import pytest

from ecshare.router.api.chat import read_chat
from ecshare.router.api.client_request import Media
from ecshare.router.api.endpoints import Reader, read_completion, read_responses
from ecshare.router.media.identity import identity
from ecshare.router.stages.plan import decode_work, item_work, prompt_work
from ecshare.router.types import Work
from tests.ecshare.router.bodies import PNG, PNG_2, picture, text

SYSTEM = {"role": "system", "content": "Be brief."}
LONG = "a document. " * 1000


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def work_of(*messages: Any, **fields: Any) -> Work:
    return work(read_chat, messages=messages, **fields)


def work(read: Reader, **fields: Any) -> Work:
    client = read(json.dumps({"model": "m", **fields}).encode(), 64)
    media = [Media(identity(item.modality, item.source), item.source) for item in client.items]
    return prompt_work(client, media)


ANSWER = {"role": "assistant", "content": "It is a cat."}
HELLO = user(text("Hello"))
CAT = user(text("What is this?"), picture(PNG))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((HELLO,), ({"role": "user", "content": "Hello"}, ANSWER, user(text("And then?")))),
        ((SYSTEM, HELLO), (SYSTEM, HELLO, ANSWER, HELLO)),
        ((CAT,), (CAT, ANSWER, user(picture(PNG_2)))),
        ((CAT,), (user(picture(PNG), text("Which colour does it have?")),)),
        ((user(text(LONG + "Who?")),), (user(text(LONG + "When?")),)),
        ((SYSTEM,), (SYSTEM,)),
    ],
)
def test_what_has_its_start_in_common_has_one_key(one: Any, other: Any) -> None:
    assert work_of(*one).key == work_of(*other).key != b""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((HELLO,), (user(text("Good morning")),)),
        ((HELLO,), (SYSTEM, HELLO)),
        ((CAT,), (user(text("What is this?"), picture(PNG_2)),)),
        ((CAT,), (user(text("What is this?")),)),
        ((user(text("ab"), text("c")),), (user(text("ab"), picture(PNG)),)),
    ],
)
def test_others_differ(one: Any, other: Any) -> None:
    assert work_of(*one).key != work_of(*other).key


def test_tenants_and_models_differ() -> None:
    keys = {
        work_of(HELLO, **fields).key
        for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"model": "n"})
    }
    assert len(keys) == 4
    assert work_of(HELLO, temperature=1).key in keys


def test_tokens_grow_with_text_and_media() -> None:
    assert work_of(user(text("x" * 4000))).tokens == 1001
    assert work_of(user(text("x" * 4000)), user(text("x" * 4000))).tokens == 2001
    assert work_of(user(picture(PNG), picture(PNG_2))).tokens == 2001
    assert work_of({"role": "user", "content": None}).tokens == 1


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 256),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7, "max_tokens": 5}, 7),
        ({"max_tokens": 10**30}, 4096),
        ({"max_tokens": -5}, 1),
        ({"max_tokens": True}, 256),
        ({"max_tokens": "many"}, 256),
    ],
)
def test_decode_counts_what_may_be_said(fields: dict[str, Any], tokens: int) -> None:
    assert decode_work(Work(b"k", 100, "m"), fields) == Work(b"k", 100 + tokens, "m")


def test_an_item_is_work_by_its_kind() -> None:
    (item,) = read_chat(json.dumps({"messages": [CAT]}).encode(), 1).items
    assert item_work(b"k", item, "m") == Work(b"k", 1000, "m")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": []},
        {"role": "user", "content": ["plain", {"text": 5}, {"type": "text"}, {"text": {"a": []}}]},
        {"role": "", "content": "\U0001f600" * 5000},
    ],
)
def test_odd_messages_are_work_too(message: Any) -> None:
    work = work_of(message, cache_salt={"not": "text"})
    assert work.key
    assert work.tokens >= 1


def test_prompts_at_other_endpoints_have_keys_too() -> None:
    image = {"type": "input_image", "image_url": picture(PNG)["image_url"]["url"]}
    asked = [user({"type": "input_text", "text": "What is this?"}, image)]
    again = [user({"type": "input_text", "text": "And its colour?"}, image), ANSWER]
    alike = [work(read_responses, input=each, instructions="Be brief.") for each in (asked, again)]
    assert alike[0].key == alike[1].key
    alone = work(read_responses, input=asked)
    assert alone.key != alike[0].key
    assert alone.tokens > 1000
    hello = [work(read_responses, input=each) for each in ("Hello", [user("Hello")])]
    assert hello[0].key == hello[1].key
    ids = [work(read_completion, prompt=[each] * 99) for each in (7, 8)]
    assert ids[0].key != ids[1].key
    assert ids[0].tokens > 20
