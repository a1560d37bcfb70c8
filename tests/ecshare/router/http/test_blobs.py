# SPDX-License-Identifier: Apache-2.0
"""Long base64 texts that stay out of a request's JSON, and come back where they were."""

import base64
import json
import random
from typing import Any

import msgspec
import pybase64
import pytest
from aiohttp.test_utils import make_mocked_request

from ecshare.router.api.chat import CHAT
from ecshare.router.api.errors import Dialect
from ecshare.router.http.bodies import Blobs, MemoryBudget, Payload, Reservation
from ecshare.router.http.context import RequestContext
from ecshare.router.http.drain import RequestsInFlight
from ecshare.router.media.identity import identity
from tests.ecshare.router.bodies import chat, data_url, picture
from tests.ecshare.router.fake_engine import fleet

KIB = 1024
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
BREAKS = ("", ",", ":", "\\n", "\\/", "\\\\", '\\"', "\\u0041", "\\u002b", "é", " ", "]", "-")


async def through(body: str) -> int:
    """Check that what is sent of a body is what came, and return the bytes that are decoded."""
    blobs = Blobs()
    short = await blobs.extract(body.encode())
    payload = Payload(blobs, msgspec.json.decode(short))
    whole = b"".join(payload.pieces())
    assert payload.num_bytes == len(whole)
    assert json.loads(whole) == json.loads(body)
    return len(short)


def text(rng: random.Random) -> str:
    """JSON of a string with some long runs of base64, and what may be between them."""
    parts = [rng.choice(BREAKS)]
    for _ in range(rng.randrange(4)):
        parts.append("".join(rng.choices(LETTERS, k=8)) * rng.choice((0, 1, 2000, 4096, 6000)))
        parts.append(LETTERS[: rng.randrange(20)])
        parts += rng.choices(BREAKS, k=rng.randrange(3))
    return '"' + "".join(parts) + '"'


@pytest.mark.parametrize("seed", range(60))
async def test_what_is_sent_is_what_came(seed: int) -> None:
    rng = random.Random(seed)
    values = [text(rng) for _ in range(rng.randrange(1, 6))]
    await through('{"a":[' + ",".join(values) + '],"b":{' + text(rng) + ":" + text(rng) + "}}")


@pytest.mark.parametrize("size", [16 * KIB, 32 * KIB, 100_000, 3_000_000])
@pytest.mark.parametrize("shift", [0, 1, 16 * KIB - 1])
async def test_pictures_stay_out_of_the_json(size: int, shift: int) -> None:
    url = data_url(random.Random(size).randbytes(size))
    num_decoded = await through(json.dumps({"pad": "-" * shift, "url": url, "end": "x"}))
    assert (num_decoded < shift + 200) is (size > 16 * KIB)


@pytest.mark.parametrize("inner", ["=", "==", "=AA", "=" * 20_000])
async def test_padding_in_the_middle_ends_no_text(inner: str) -> None:
    assert await through(json.dumps({"text": "A" * 50_000 + inner + "A" * 50_000})) < 200


@pytest.mark.parametrize(
    "body",
    [
        "1" * 100_000, "A" * 100_000, '{"a":' + "1" * 50_000 + "}", '{"a":tr' + "u" * 50_000,
        '"\\' + "u00" * 20_000 + '"', '"' + "A" * 50_000, '{"a":"' + "A" * 50_000 + "}",
    ],
)  # fmt: skip
async def test_what_was_no_json_is_none(body: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        await through(body)


def test_names_are_secret_and_texts_go_when_they_are_let_go_of() -> None:
    blobs, other = Blobs(), Blobs()
    name = blobs.add(b"QUJD")
    assert blobs.holds(f"before {name} after")
    assert not other.holds(name)
    assert other.resolve(name) == name.encode()
    assert bytes(blobs.resolve(f"{name}{name}")) == b"QUJDQUJD"
    assert b"".join(Payload(blobs, name).pieces()) == b'"QUJD"'
    held = bytearray(b"QUJD")
    blobs.add(held)
    blobs.clear()
    held.append(0)  # raises BufferError while anything refers to its bytes


def test_texts_go_with_their_request_however_slowly_its_answer_is_read() -> None:
    http, memory = make_mocked_request("POST", CHAT), Reservation(MemoryBudget(1))
    context = RequestContext(http, "an id", Dialect.OPENAI, CHAT, memory, RequestsInFlight())
    held = bytearray(b"QUJD")
    context.blobs.add(held)
    context.release()
    held.append(0)


@pytest.mark.parametrize("seed", range(200))
def test_an_identity_is_that_of_the_whole_text(seed: int) -> None:
    rng = random.Random(seed)
    good = base64.b64encode(rng.randbytes(rng.choice((196_608, 393_216, 500_000)))).decode()
    at = rng.choice((3, 256 * KIB - 4, 256 * KIB - 1, 256 * KIB, len(good) - 2))
    damage = rng.choice(("", "=", "==", "A", "-", "A===", "===="))
    damaged = good[:at] + damage + good[at + rng.choice((0, len(damage))) :]
    blobs = Blobs()
    url = "data:image/png;base64," + blobs.add(damaged.encode())
    try:
        content = pybase64.b64decode(damaged, validate=True)
    except ValueError:
        with pytest.raises(ValueError, match="malformed"):
            identity("image", url, blobs)
    else:
        assert identity("image", url, blobs) == identity("image", data_url(content))


async def test_large_items_of_every_kind_reach_the_engines_whole() -> None:
    content = random.Random(1).randbytes(300_000)
    sound = base64.b64encode(content).decode()
    frames = f"data:video/jpeg;base64,{sound},{sound[:40]},{sound}"
    items: list[tuple[dict[str, Any], str]] = [
        (picture(content), identity("image", data_url(content))),
        (
            {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
            identity("audio", f"data:audio/wav;base64,{sound}"),
        ),
        ({"type": "video_url", "video_url": {"url": frames}}, identity("video", frames)),
    ]
    async with fleet(0, 1) as f:
        assert (await f.post(chat(*(part for part, _ in items), user=sound)))[0].status == 200
        for body in (f.p.bodies[0], f.d.bodies[0]):
            assert body["user"] == sound
            got = body["messages"][0]["content"][1:]
            assert got == [part | {"uuid": uuid} for part, uuid in items]
