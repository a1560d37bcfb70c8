# SPDX-License-Identifier: Apache-2.0
"""Requests of the engine tests, and how they read the answers."""

import http.client
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.servers import openai_client as client
from lab.servers.engines import EngineProcess
from lab.servers.processes import LOOPBACK, Server
from tests import waiting

STORED_WITHIN_S = 60.0
COMES_WITHIN_S = 20.0
_RANK = "X-data-parallel-rank"
FAR_AHEAD = 0.1  # in the logarithm of the probability


@dataclass(frozen=True)
class Answer:
    """One answer: an HTTP status, and what came with it."""

    status: int
    body: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        assert self.status == 200, self.body
        tokens: list[int] = self.body["choices"][0]["token_ids"]
        assert tokens
        return tokens

    @property
    def num_cached_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens_details"]["cached_tokens"])

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens"])


def ask(server: Server, model: str, content: list[dict[str, Any]], **fields: Any) -> Answer:
    """Send one chat request, greedy; return the answer, whatever its status."""
    return _post(server, "chat/completions", _chat(model, content, fields))


def ask_rank(server: Server, rank: int, model: str, content: list[dict[str, Any]]) -> Answer:
    """Send one chat request to a data-parallel rank; as `ask`."""
    headers = {_RANK: str(rank)}
    return _post(server, "chat/completions", _chat(model, content, {}), headers)


def _chat(model: str, content: list[dict[str, Any]], fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }


def complete(  # noqa: PLR0913 — all parameters of a request
    server: Server,
    model: str,
    prompt: list[int],
    max_tokens: int = 12,
    *,
    rank: int | None = None,
    **fields: Any,
) -> Answer:
    """Ask, greedy, what follows these tokens. `rank`: the data-parallel rank to ask."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    headers = {} if rank is None else {_RANK: str(rank)}
    return _post(server, "completions", body, headers)


def is_certain(plain: EngineProcess, prompt: list[int], max_tokens: int = 12) -> bool:
    """Return whether the best token is far ahead of the next one at each step of `complete`.

    In a batch the kernels of CPUs add numbers up in another order. Of two tokens that are almost
    equal an engine then chooses another one than for a request alone, also without a connector.
    """
    answer = complete(plain, plain.model, prompt, max_tokens, logprobs=2)
    best_two = answer.body["choices"][0]["logprobs"]["top_logprobs"]
    return all(max(each.values()) - min(each.values()) > FAR_AHEAD for each in best_two)


def _post(
    server: Server, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Answer:
    request = urllib.request.Request(
        f"{server.base_url}/v1/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **(headers or {})},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return Answer(response.status, json.load(response))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, json.load(error))


def begin(server: Server, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
    """Send a request without reading the answer; closing the connection aborts it."""
    connection = http.client.HTTPConnection(LOOPBACK, server.port.number)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"/v1/{path}", json.dumps(body), headers)
    return connection


def wait_for_requests(engine: Server, number: int) -> None:
    """Return when the engine has this many requests."""
    names = [(f"vllm:num_requests_{at}", "") for at in ("waiting", "running")]
    wait_until(
        lambda: sum(client.counters(engine.base_url)[name] for name in names) == number,
        f"the engine never has {number} requests",
        STORED_WITHIN_S,
    )


def counts(server: Server) -> dict[str, float]:
    """Return our own counters from an engine's /metrics, by `family/event`."""
    return {
        f"{name.removesuffix('_total')}/{event}": value
        for (name, event), value in client.counters(server.base_url).items()
        if name.startswith(("ecshare_", "kvshare_")) and name.endswith("_total")
    }


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


FOR_DECODE: dict[str, Any] = {"kv_transfer_params": {"kvshare": {"for_decode": True}}}
"""What our router adds to a request to P."""
QUESTION = text("what is to be seen here, and where?")


def picture(seed: int, uuid: str | None = None, size: int = 224) -> dict[str, Any]:
    """Return a picture item; each `seed` gives another picture."""
    return _item("image", client.picture(seed, size), uuid)


def video(seed: int, uuid: str | None = None, frames_per_s: int = 2) -> dict[str, Any]:
    """Return a video item; as `picture`."""
    return _item("video", client.video(seed, frames_per_s), uuid)


def sound(seed: int, uuid: str | None = None) -> dict[str, Any]:
    """Return a sound item; as `picture`."""
    return _item("audio", client.sound(seed), uuid)


def _item(modality: str, url: str, uuid: str | None) -> dict[str, Any]:
    kind = f"{modality}_url"
    item: dict[str, Any] = {"type": kind, kind: {"url": url}}
    return item if uuid is None else item | {"uuid": uuid}


def announced(answer: Answer, uuid: str, modality: str = "image") -> dict[str, Any]:
    """Return the metadata-only item that an encoder's answer announces for `uuid`."""
    assert answer.status == 200, answer.body
    metadata = answer.body["ec_transfer_params"][uuid]["metadata"]
    assert metadata
    kind = f"{modality}_embeds"
    return {"type": kind, kind: metadata, "uuid": uuid}


def passed_on(*encoded: Answer) -> dict[str, Any]:
    """Return what a router adds to the next request: the consumer then waits for the items."""
    params: dict[str, Any] = {}
    for answer in encoded:
        assert answer.status == 200, answer.body
        params |= answer.body["ec_transfer_params"]
    return {"ec_transfer_params": params}


def warmed(corpus: Path, *options: str) -> dict[str, int]:
    """Run `ecshare warm`; return how many samples had each outcome."""
    command = [sys.executable, "-m", "ecshare", "warm", str(corpus), *options, "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    samples: dict[str, int] = json.loads(ended.stdout)["samples"]
    return {name: number for name, number in samples.items() if number}


def stored_kv(root: Path, part: str) -> set[Path]:
    """Return the KV objects of a store in `root`, once nothing has been added for a second.

    Engines answer before they have stored.
    """
    seen: set[Path] | None = None
    deadline_s = time.monotonic() + STORED_WITHIN_S
    while time.monotonic() < deadline_s:
        found = {path for path in (root / "store" / "kv").rglob(f"*.{part}") if path.is_file()}
        if found == seen:
            return found
        seen = found
        time.sleep(1)
    raise AssertionError("the engine never ends to store")


def wait_until(is_so: Callable[[], bool], otherwise: str, within_s: float = COMES_WITHIN_S) -> None:
    """Return as soon as the condition holds; fail with the message `otherwise` after that time."""
    waiting.wait_until(is_so, within_s, otherwise, pause_s=0.02)


@contextmanager
def counting(server: Server) -> Iterator[Counter[str]]:
    """What the engine counted inside the block, by `family/event`; filled in when it ends."""
    gained: Counter[str] = Counter()
    before = counts(server)
    yield gained
    after = counts(server)
    gained.update({name: int(value - before.get(name, 0)) for name, value in after.items()})
