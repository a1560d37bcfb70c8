# SPDX-License-Identifier: Apache-2.0
"""`ecshare warm`: what is sent to servers, what is reported, and what is refused."""

import asyncio
import base64
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ecshare.cli import main
from ecshare.router.media.identity import identity
from ecshare.store.format import PROLOGUE_BYTES
from ecshare.store.keys import Kind, manifest_key, namespace_digest, object_key
from lab.servers import stand_in_server
from lab.servers.processes import Port
from tests.ecshare.router.answers import failing, hang_up, prefilled
from tests.ecshare.router.bodies import data_url
from tests.ecshare.warm.servers import engine, files
from tests.waiting import wait_until

Warm = Callable[..., tuple[int, str, str]]


@pytest.fixture
def warm(capsys: pytest.CaptureFixture[str]) -> Warm:
    """Run the command; return its status, and what it printed."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["warm", *map(str, arguments)])
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures" / "inner"
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number}.png").write_bytes(b"picture %d" % number)
    (folder.parent / "copy.png").write_bytes(b"picture 0")
    (folder.parent / "labels.json").write_text("{}")
    return folder.parent


def uuid_of(content: bytes) -> str:
    return identity("image", data_url(content))


async def encoded(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer as an encode engine; `stored` pictures were there before."""
    (part,) = body["messages"][0]["content"]
    report: dict[str, Any] = {"metadata": {"image_grid_thw": [1, 2, 2]}, "item_indices": [0]}
    content = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    if content == b"picture 1":
        report["stored"] = True
    return web.json_response({"ec_transfer_params": {part["uuid"]: report}})


def counts(out: str) -> dict[str, int]:
    found: dict[str, int] = json.loads(out)["samples"]
    return {name: number for name, number in found.items() if number}


def test_each_picture_of_a_folder_is_sent_once_under_the_routers_name(
    warm: Warm, pictures: Path
) -> None:
    with engine(encoded) as e:
        status, out, err = warm(pictures, "--encoder", e.url, "--json")
    assert (status, err) == (0, "")
    sent = [body["messages"][0]["content"][0]["uuid"] for body in e.bodies]
    assert sorted(sent) == sorted(uuid_of(b"picture %d" % number) for number in range(3))
    assert {body["model"] for body in e.bodies} == {"m"}
    assert all(body["ec_transfer_params"] == {"ecshare_save": True} for body in e.bodies)
    assert counts(out) == {"new": 2, "there already": 1, "repeated": 1, "not sent": 1}


def test_wrong_lines_are_named_and_counted_and_the_rest_is_sent(warm: Warm, tmp_path: Path) -> None:
    content = [{"type": "image_url", "image_url": {"url": data_url(b"a")}}]
    lines = [
        "nonsense \x1b[2J",
        json.dumps({"messages": [{"role": "user", "content": content}]}),
        "",
        json.dumps({"messages": [{"content": "who says so?"}]}),
        json.dumps({"question": 1}),
        json.dumps({"messages": [{"role": "user", "content": "no picture"}]}),
    ]
    corpus = tmp_path / "a\x1b[2J.jsonl"
    corpus.write_text("\n".join(lines))
    with engine(encoded) as e:
        status, out, err = warm(corpus, "--encoder", e.url)
    assert status == 1
    assert len(e.bodies) == 1
    first, second, third = err.splitlines()
    assert "a\\x1b[2J.jsonl:1: The body is not valid JSON" in first
    assert "a\\x1b[2J.jsonl:4: `messages[0].role`: `role` must be a string." in second
    assert "a\\x1b[2J.jsonl:5: there is neither `messages` nor `prompt`" in third
    assert re.search(r"^failed +3 ", out, re.MULTILINE)
    assert "\x1b" not in out + err


def test_many_failures_end_the_run_and_few_are_shown(warm: Warm, tmp_path: Path) -> None:
    corpus = tmp_path / "urls.txt"
    corpus.write_text("ftp://example/x\n" * 90)
    with engine(encoded) as e:
        status, out, err = warm(corpus, "--encoder", e.url, "--max-failures", "30")
    assert status == 1
    assert "and 10 more failures" in err
    assert "stopped: as many have failed as may" in err
    assert len(err.splitlines()) == 22


def test_engine_downloads_nothing_and_internal_addresses_are_refused(
    warm: Warm, tmp_path: Path
) -> None:
    corpus = tmp_path / "urls.txt"
    with files({"/a.png": b"far away"}) as url, engine(encoded) as e:
        corpus.write_text(f"# pictures\n{url}/a.png\n")
        status, _, err = warm(corpus, "--encoder", e.url)
        assert (status, e.bodies) == (1, [])
        assert "its address is not public" in err
        status, _, err = warm(corpus, "--encoder", e.url, "--allow-media-network", "127.0.0.0/8")
        assert (status, err) == (0, "")
    (part,) = e.bodies[0]["messages"][0]["content"]
    assert part["uuid"] == uuid_of(b"far away")
    assert part["image_url"]["url"].startswith("data:")


def test_router_gets_urls_unchanged_and_no_kv_is_stored(warm: Warm, tmp_path: Path) -> None:
    async def routed(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        url = body["messages"][0]["content"][0]["image_url"]["url"]
        stage = "x-ecshare-avoided" if "old" in url else "x-ecshare-path"
        headers = {"x-ecshare-path": "decode", stage: "encode"}
        return web.json_response(
            {}, headers=headers if "alone" not in url else {"x-ecshare-path": "decode"}
        )

    corpus = tmp_path / "urls.txt"
    names = ("new", "old", "alone")
    corpus.write_text("".join(f"http://10.0.0.1/{name}.png\n" for name in names))
    with engine(routed) as router:
        status, out, err = warm(corpus, "--server", router.url, "--json")
    assert status == 1
    assert counts(out) == {"new": 1, "there already": 1, "failed": 1}
    assert "no encode engine has worked for it" in out
    for body in router.bodies:
        assert body["kv_transfer_params"] == {"kvshare_save": False}
        assert body["ec_transfer_params"] == {"ecshare_save": True}
        assert body["max_tokens"] == 1
    assert {body["messages"][0]["content"][0]["image_url"]["url"] for body in router.bodies} == {
        f"http://10.0.0.1/{name}.png" for name in names
    }


def test_prompts_are_prefilled_for_one_token(warm: Warm, tmp_path: Path) -> None:
    async def answered(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        is_old = body.get("prompt") == "old"
        usage = {
            "prompt_tokens": 1000,
            "prompt_tokens_details": {"cached_tokens": 999 if is_old else 16},
        }
        hand_over = {"kvshare": {"num_tokens": 999}}
        return web.json_response({"usage": usage, "kv_transfer_params": hand_over})

    corpus = tmp_path / "prompts.jsonl"
    system = {"role": "system", "content": 'You are "messages".'}
    lines: list[Any] = [{"messages": [system], "max_tokens": 99, "stream": True}]
    lines += [{"prompt": 'new "messages"'}, {"prompt": "old"}]
    corpus.write_text("\n".join(map(json.dumps, lines)))
    with engine(answered) as p:
        status, out, _ = warm(corpus, "--prefiller", p.url, "--json")
    assert status == 0
    assert counts(out) == {"new": 2, "there already": 1}
    assert sorted(p.paths) == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
    for body in p.bodies:
        assert body["max_tokens"] == 1
        assert body["stream"] is False
        assert body["kv_transfer_params"] == {"kvshare": {"for_decode": True}}
    with engine(answered) as server:
        assert warm(corpus, "--kv", "--server", server.url)[0] == 0
    assert all(
        body["kv_transfer_params"] == {"kvshare_save": True} and "ec_transfer_params" not in body
        for body in server.bodies
    )


def store_of(root: Path, *contents: bytes, model: str = "m") -> str:
    """A store with embeddings of 7 rows; return its namespace."""
    facts = {"model": model, "encoder_width": 8}
    namespace = namespace_digest(facts)
    paths = [root / manifest_key(Kind.EC, namespace)]
    keys = [object_key(Kind.EC, namespace, f"7::{uuid_of(content)}") for content in contents]
    paths += [root / key for key in keys]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(PROLOGUE_BYTES + 7 * 8 * 2))
    paths[0].write_text(json.dumps(facts))
    return namespace


def test_stored_media_are_not_sent(warm: Warm, pictures: Path, tmp_path: Path) -> None:
    store_of(tmp_path / "store", b"picture 0", b"picture 2", b"another")
    with engine(encoded) as e:
        _, out, _ = warm(pictures, "--encoder", e.url, "--store", tmp_path / "store", "--json")
    (body,) = e.bodies
    assert body["messages"][0]["content"][0]["uuid"] == uuid_of(b"picture 1")
    assert counts(out) == {"there already": 3, "repeated": 1, "not sent": 1}


def test_dry_run_sends_nothing_and_estimates(warm: Warm, pictures: Path, tmp_path: Path) -> None:
    store_of(tmp_path / "store", b"picture 0")
    status, out, err = warm(
        pictures, "--dry-run", "--store", tmp_path / "store", "--model", "m", "--rate", "0.01"
    )
    assert (status, err) == (0, "")
    assert re.search(r"^to send \(new\) +2 +18 B$", out, re.MULTILINE)
    assert re.search(r"^there already +1 ", out, re.MULTILINE)
    assert "about 3.3 min at 0.01 a second" in out


def test_several_namespaces_are_named_and_one_is_chosen(
    warm: Warm, pictures: Path, tmp_path: Path
) -> None:
    known = [store_of(tmp_path / "store", b"picture 0", model=name) for name in ("a", "b")]
    options = ("--dry-run", "--store", tmp_path / "store")
    status, _, err = warm(pictures, *options)
    assert status == 2
    assert all(name in err for name in known)
    assert warm(pictures, *options, "--namespace", known[0])[0] == 0
    assert warm(pictures, *options, "--model", "b")[0] == 0
    status, _, err = warm(pictures, *options, "--namespace", "0" * 32)
    assert (status, "--namespace" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere", "--encoder", "http://e"), "no such file or folder"),
        (("x.tar.gz", "--encoder", "http://e"), "unpack it first"),
        (("nowhere*", "--encoder", "http://e"), "no file matches"),
        ((".",), "say one of --encoder, --prefiller and --server"),
        ((".", "--encoder", "http://e", "--server", "http://s"), "say one of"),
        ((".", "--encoder", "http://e", "--kv"), "an encode engine stores no KV"),
        ((".", "--encoder", "e:1"), "--encoder: 'e:1' must look like http://host:port"),
        ((".", "--encoder", "dns+http://e"), "--encoder: dns+ is for the router"),
        ((".", "--encoder", "http://e", "--api-key", "secret"), "as env:NAME or file:/path"),
        ((".", "--encoder", "http://e", "--router-key", "env:NONE"), "--router-key"),
        ((".", "--dry-run", "--allow-media-network", "x"), "--allow-media-network"),
        ((".", "--dry-run", "--concurrency", "0"), "--concurrency"),
        ((".", "--dry-run", "--store", "s3:/x"), "is not an absolute folder"),
    ],
)
def test_wrong_usage_is_reported_in_one_sentence_with_status_2(
    warm: Warm, arguments: tuple[str, ...], words: str
) -> None:
    status, out, err = warm(*arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert "secret" not in err


async def rubbish(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(body=b"[" * 100_000)


async def number(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"ec_transfer_params": {"x": 4}})


async def endless(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(http)
    while True:
        await response.write(b" " * 65536)
        await asyncio.sleep(0)


async def silent(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (rubbish, "the answer is no JSON"),
        (number, "the engine announces no embedding"),
        (prefilled, "the engine announces no embedding"),
        (failing(400), "HTTP 400: engine says no"),
        (endless, "the answer is larger than 4 MiB"),
        (silent, "no answer within --timeout"),
    ],
)
def test_invalid_answer_fails_its_sample(
    warm: Warm, tmp_path: Path, answer: Any, reason: str
) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    timeout = "0.2" if answer is silent else "30"
    with engine(answer) as e:
        status, _, err = warm(tmp_path / "a.png", "--encoder", e.url, "--timeout", timeout)
    assert status == 1
    assert reason in err


def test_transient_failure_is_retried(
    warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ecshare.warm.client._FIRST_PAUSE_S", 0.01)
    (tmp_path / "a.png").write_bytes(b"a")
    asked = iter([hang_up, failing(503), encoded])

    async def in_turn(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await next(asked)(http, body)

    with engine(in_turn) as e:
        assert warm(tmp_path / "a.png", "--encoder", e.url)[0] == 0
    assert len(e.bodies) == 3
    with engine(failing(503)) as e:
        status, _, err = warm(tmp_path / "a.png", "--encoder", e.url)
    assert (status, len(e.bodies)) == (1, 4)
    assert "HTTP 503: engine says no, 4 times" in err


def test_missing_server_is_reported_at_once(warm: Warm, tmp_path: Path) -> None:
    status, _, err = warm(tmp_path, "--encoder", "http://127.0.0.1:1")
    assert (status, "Cannot connect" in err) == (1, True)


def test_keys_are_sent_and_not_shown(
    warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "k" * 40)
    (tmp_path / "a.png").write_bytes(b"a")
    with engine(encoded) as e:
        keys = ("--api-key", "env:KEY", "--router-key", "env:KEY")
        assert warm(tmp_path / "a.png", "--encoder", e.url, *keys)[0] == 0
    (headers,) = e.headers
    assert headers["authorization"] == "Bearer " + "k" * 40
    assert re.fullmatch("[0-9a-f]{64}", headers["x-ecshare-router"])


def test_run_ends_after_most_requests_and_the_next_one_continues(
    warm: Warm, pictures: Path
) -> None:
    with engine(encoded) as e:
        status, out, _ = warm(
            pictures, "--encoder", e.url, "--most", "1", "--concurrency", "1", "--json"
        )
    assert (status, len(e.bodies)) == (0, 1)
    assert "--most" in json.loads(out)["stopped"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_run_with_its_report(pictures: Path, number: int) -> None:
    begun = []

    async def held(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        begun.append(body)
        if len(begun) > 1:
            await asyncio.Event().wait()
        return await encoded(http, body)

    with engine(held) as e:
        process = subprocess.Popen(
            [sys.executable, "-m", "ecshare", "warm", str(pictures), "--encoder", e.url, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: len(begun) > 1)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert json.loads(out)["samples"]["failed"] == 0
    assert "Traceback" not in err


def started(stage: str, port: int) -> str:
    program = Path(stand_in_server.__file__)
    return f"'{sys.executable}' -S '{program}' {stage} {port}"


def test_engine_is_started_and_ended(warm: Warm, pictures: Path) -> None:
    port = Port().number
    url = f"http://127.0.0.1:{port}"
    status, out, _ = warm(pictures, "--encoder", url, "--start", started("encode", port), "--json")
    assert (status, counts(out)["new"]) == (0, 3)
    assert warm(pictures, "--encoder", url)[0] == 1, "it still runs"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("false", "the engine ended with status 1"),
        ("/no/such/program", "No such file"),
        ("'open quote", "No closing quotation"),
    ],
)
def test_engine_that_does_not_start_is_reported(
    warm: Warm, pictures: Path, command: str, reason: str
) -> None:
    status, _, err = warm(pictures, "--encoder", "http://127.0.0.1:1", "--start", command)
    assert status == 1
    assert reason in err
