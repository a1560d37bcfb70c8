# SPDX-License-Identifier: Apache-2.0
"""`ecshare top`: rates between two polls, hostile servers, and a terminal that is redrawn."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import pytest

from ecshare.cli import main
from ecshare.commands import metrics_page
from ecshare.commands.metrics_page import Page, read_url
from lab.servers.processes import Port
from tests.ecshare.router.router_process import router_process
from tests.metrics_server import Write, metrics_server

Top = Callable[..., tuple[int, str, str]]

BEFORE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a\\"},\\u2028b"} 2
vllm:num_requests_running{engine="1",model_name="m"} 1
vllm:num_requests_waiting{engine="0"} 5
vllm:prompt_tokens_total{engine="0"} 1000
vllm:generation_tokens_total{engine="0"} 1e3
kvshare_tokens_total{event="queried"} 0
kvshare_tokens_total{event="loaded"} 0
kvshare_blocks_total{event="missed"} 10
kvshare_blocks_total{event="dropped"} 0
ecshare_items_total{event="loaded"} 7
ecshare_items_total{event="failed"} NaN
kvshare_transfer_bytes_total{direction="read",tier="store"} 0
kvshare_transfer_bytes_total{direction="read",tier="host"} 0
kvshare_transfer_bytes_total{direction="write",tier="store"} 0
ecshare_transfer_bytes_total{direction="write",tier="store"} 0
kvshare_transfer_seconds_sum{direction="read",tier="store"} 0
kvshare_transfer_seconds_count{direction="read",tier="store"} 0
kvshare_breaker_open{half="worker",direction="write"} 0
vllm:engine_sleep_state{sleep_state="awake"} 1
"""
AFTER = """\
vllm:num_requests_running{engine="0",model_name="m"} 4
vllm:num_requests_waiting{engine="0"} 0
vllm:prompt_tokens_total{engine="0"} 300
vllm:generation_tokens_total{engine="0"} 1000
kvshare_tokens_total{event="queried"} 400
kvshare_tokens_total{event="loaded"} 100
kvshare_blocks_total{event="missed"} 10
kvshare_blocks_total{event="dropped"} 3
ecshare_items_total{event="loaded"} 7
ecshare_items_total{event="failed"} +Inf
kvshare_transfer_bytes_total{direction="read",tier="store"} 1000
kvshare_transfer_bytes_total{direction="read",tier="host"} 3000
kvshare_transfer_bytes_total{direction="write",tier="store"} 5000
ecshare_transfer_bytes_total{direction="write",tier="store"} 5000
kvshare_transfer_seconds_sum{direction="read",tier="store"} 0.5
kvshare_transfer_seconds_count{direction="read",tier="store"} 10
kvshare_breaker_open{half="worker",direction="write"} 1
vllm:engine_sleep_state{sleep_state="awake"} 0
"""
EVERY = 0.2


@pytest.fixture
def top(capsys: pytest.CaptureFixture[str]) -> Top:
    def run(*arguments: str, every: float = EVERY) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["top", *arguments, "--every", str(every)])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def test_rates_of_an_engine_are_those_between_two_polls(top: Top) -> None:
    with metrics_server(BEFORE, AFTER) as engine:
        status, out, err = top(engine.url, "--json")
    assert (status, err) == (0, "")
    row = json.loads(out)
    assert (row["target"], row["kind"], row["state"]) == (engine.name, "engine", "asleep")
    assert (row["running"], row["waiting"], row["breakers"]) == (4, 0, ["write"])
    assert (row["hit_percent"], row["host_percent"], row["read_ms"]) == (25, 75, 50)
    assert row["write_ms"] is None
    # A machine under load may take longer than `EVERY`, but not less.
    per_s = row["loaded_tokens_per_s"]
    assert 100 / 10 < per_s <= 100 / EVERY
    assert row["saved_bytes_per_s"] == pytest.approx(per_s * 100)
    assert row["read_bytes_per_s"] == pytest.approx(per_s * 10)
    assert row["failures_per_s"] == pytest.approx(per_s * 0.03)
    assert row["misses_per_s"] == row["loaded_items_per_s"] == row["generated_tokens_per_s"] == 0
    assert row["prompt_tokens_per_s"] == pytest.approx(per_s * 3), "it began anew, at zero"


def test_tables_have_engines_and_unreachable_targets(top: Top) -> None:
    port = Port()
    with metrics_server(BEFORE, AFTER) as engine:
        status, out, _ = top(engine.url, f"http://127.0.0.1:{port.number}")
    port.release()
    assert status == 1
    lines = out.splitlines()
    assert lines[1].split()[:4] == [engine.name, "asleep", "4", "0"]
    assert re.search(rf"^{engine.name} +open: write ", out, re.MULTILINE)
    assert re.search(rf"^127.0.0.1:{port.number} +\S", lines[-1])


async def test_router_and_engine_are_distinguished() -> None:
    async with router_process("http://127.0.0.1:9") as router:
        command = [sys.executable, "-m", "ecshare", "top", f"http://127.0.0.1:{router.port}"]
        ended = subprocess.run(
            [*command, "--every", "0.1", "--json"], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        row = json.loads(ended.stdout)
    assert (row["kind"], row["requests_per_s"], row["errors_per_s"]) == ("router", 0, None)
    (stage,) = row["stages"]
    assert (stage["stage"], stage["engines"], stage["calls_per_s"]) == ("decode", 1, 0)


ROUTER = """\
ecshare_router_requests_in_progress 1
ecshare_router_answers_total{{route="/v1/chat/completions",status="2xx"}} {0}
ecshare_router_answers_total{{route="/metrics",status="2xx"}} {1}
ecshare_router_request_seconds_sum{{path="decode"}} {0}
ecshare_router_request_seconds_count{{path="decode"}} {0}
ecshare_router_encodes_total{{event="asked"}} {0}
ecshare_router_encodes_total{{event="avoided"}} {1}
ecshare_router_prefills_total{{event="lost"}} {1}
ecshare_router_prefills_total{{event="avoided"}} {0}
ecshare_router_engine_available{{stage="decode",engine="decode-1"}} 1
ecshare_router_engine_available{{stage="\x1b[2J",engine="x"}} 1
ecshare_router_calls_total{{stage="decode",engine="decode-1",outcome="failed"}} {0}
"""


def test_requests_of_the_routers_own_pages_are_not_counted(top: Top) -> None:
    with metrics_server(ROUTER.format(0, 0), ROUTER.format(10, 30)) as router:
        status, out, _ = top(router.url, "--json")
    row = json.loads(out)
    assert (status, row["kind"], row["in_progress"], row["request_ms"]) == (0, "router", 1, 1000)
    assert 1 < row["requests_per_s"] <= 10 / EVERY
    assert (row["encodes_avoided_percent"], row["prefills_avoided_percent"]) == (75, 100)
    (stage,) = row["stages"]
    assert stage["failed_per_s"] == pytest.approx(row["requests_per_s"])
    with metrics_server(ROUTER.format(0, 0), ROUTER.format(10, 30)) as router:
        _, out, _ = top(router.url)
    assert re.search(rf"^{router.name} +decode +1/1 ", out, re.MULTILINE)
    assert "\x1b" not in out


def drip(write: Write) -> None:
    write(b"HTTP/1.1 200 OK\r\n")
    while True:
        write(b"x-a: b\r\n")
        time.sleep(0.01)


def flood(write: Write) -> None:
    write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        write(b"vllm:a 1\n" * 100_000)


def silent(write: Write) -> None:
    time.sleep(1)


OK = b"HTTP/1.1 200 OK\r\n"
HOSTILE = [
    (drip, "no whole answer within 0.5 s"),
    (silent, "no whole answer within 0.5 s"),
    (flood, "answers with more than 8 MiB"),
    (b"", "RemoteDisconnected|Remote end closed"),
    (b"\xff\xfe\x00" * 1000, r"\S"),
    (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "302, a redirect, which"),
    (b"HTTP/1.1 401 No\r\n\r\nvllm:a 1", "status 401; it may want a key"),
    (b"HTTP/1.1 500 \x1b[2J\r\n\r\n", "status 500"),
    (OK + b"\r\n<html>\x1b[2J</html>", "has no metrics"),
    (OK + b"Content-Length: 99\r\n\r\nvllm:a 1", "IncompleteRead"),
    (OK + b"Content-Length: " + b"9" * 30 + b"\r\n\r\nvllm:a 1", r"\S"),
    (OK + b"Content-Length: -9\r\n\r\n", "has no metrics"),
    (OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nvllm:a 1", r"\S"),
    (OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\nvllm:a 1", r"\S"),
    (OK + b"Content-Encoding: gzip\r\n\r\n\x1f\x8b\x08" + b"\0" * 99, "has no metrics"),
    (OK + b"a: b\r\n" * 10_000 + b"\r\n", "more than 100 headers"),
    (OK + b"\r\nvllm:a nan\nvllm:b{ 5\nvllm:c{x=\"} 5\nvllm:d", "has no metrics"),
    (b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000, r"\S"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "words"), HOSTILE)
def test_hostile_answer_is_reported_and_other_targets_are_shown(
    top: Top, monkeypatch: pytest.MonkeyPatch, page: bytes | Callable[[Write], None], words: str
) -> None:
    monkeypatch.setattr(metrics_page, "_WITHIN_S", 0.5)
    begun_s = time.monotonic()
    with metrics_server(page) as server, metrics_server(BEFORE) as engine:
        status, out, err = top(server.url, engine.url, "--json", every=0.1)
    assert (status, err) == (1, "")
    bad, good = map(json.loads, out.splitlines())
    assert re.search(words, bad["error"]), bad
    assert "\x1b" not in bad["error"]
    assert len(bad["error"]) < 500
    assert good["running"] == 3
    assert time.monotonic() - begun_s < 8


def test_chunked_answer_is_read(top: Top) -> None:
    body = BEFORE.encode()
    parts = [body[at : at + 100] for at in range(0, len(body), 100)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    page = OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    with metrics_server(page) as server:
        status, out, _ = top(server.url, "--json", every=0.1)
    assert (status, json.loads(out)["running"]) == (0, 3)


@pytest.mark.parametrize(
    "line",
    [
        "vllm:a{" + "a" * 3990 + "} 5",
        "vllm:a{" + 'a="' * 1330 + "} 5",
        'vllm:a{a="\\' * 1000,
        "vllm:a{" + "}" * 4100 + " 5",
        'vllm:a{a="b"} ' + " " * 4000,
    ],
)
def test_hostile_labels_are_parsed_in_linear_time(line: str) -> None:
    begun_s = time.process_time()
    Page("\n".join([line] * ((8 << 20) // len(line))), 0.0)
    assert time.process_time() - begun_s < 5


def test_number_of_series_is_bounded() -> None:
    lines = (f'vllm:a{{x="{n}"}} 1' for n in range(60_000))
    assert Page("\n".join(lines), 0.0).total("vllm:a") == 50_000


def test_header_is_sent_from_the_environment(top: Top, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "Bearer secret")
    with metrics_server(BEFORE) as server:
        _, out, _ = top(server.url, "--header", "authorization=env:THE_KEY", "--json", every=0.1)
        assert "\r\nauthorization: Bearer secret\r\n" in server.requests[0]
    assert server.requests[0].startswith("GET /metrics HTTP/1.1\r\n")
    assert "secret" not in out


WRONG = [
    ((), "URL..."),
    (("ftp://x",), "'ftp://x' is no url"),
    (("http://",), "is no url"),
    (("http://x:99999",), "is no url"),
    (("http://x/a b",), "is no url"),
    (("http://x/\u00e4",), "is no url"),
    (("http://user:secret@x",), "is no url"),
    (("http://x\x1b[2J",), "is no url"),
    (("http://x", "--header", "a"), "--header: 'a' is no NAME=VALUE"),
    (("http://x", "--header", "a b=c"), "--header: 'a b' is no"),
    (("http://x", "--header", "Host=c"), "--header: 'Host' is no"),
    (("http://x", "--header", "a=b\r\nc: d"), "--header: the value of a"),
    (("http://x", "--header", "a=env:NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_wrong_argument_is_named_with_status_2(
    top: Top, arguments: Sequence[str], words: str
) -> None:
    status, out, err = top(*arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert "\x1b" not in err
    assert "secret" not in err


def test_interval_is_checked(top: Top) -> None:
    assert top("http://x", every=float("nan"))[0] == 2
    assert top("http://x", every=0)[0] == 2


def test_url_may_have_a_path_and_ipv6() -> None:
    assert read_url("http://[::1]:80/a/metrics?b=c")[:4] == (
        "[::1]:80",
        "::1",
        80,
        "/a/metrics?b=c",
    )
    assert read_url("https://host/")[:4] == ("host:443", "host", 443, "/metrics")


def test_terminal_is_redrawn_until_sigint() -> None:
    with metrics_server(BEFORE, AFTER) as engine:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "ecshare", "top", engine.url, "--every", "0.1"]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs,
                                   env=os.environ | {"COLUMNS": "120", "LINES": "30"})  # fmt: skip
        os.close(theirs)
        seen = b""
        begun_s = time.monotonic()
        while seen.count(b"asleep") < 3 and time.monotonic() - begun_s < 20:
            if select.select([ours], [], [], 0.1)[0]:
                seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        os.close(ours)
    assert seen.count(b"asleep") >= 3
    assert seen.count(engine.name.encode()) >= 6
