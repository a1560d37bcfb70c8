# SPDX-License-Identifier: Apache-2.0
"""examples/coordinator sends what llm-d's coordinator sends with shared storage."""

import asyncio
import sys
from typing import Any

import pytest
from aiohttp import web

from tests.docs.pages import ROOT
from tests.ecshare.router.answers import prefilled
from tests.ecshare.router.fake_engine import FakeEngine

SAID = "There was an old stone house."


async def answered(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    return web.json_response({"choices": [{"message": {"content": SAID}}], "usage": usage})


@pytest.mark.parametrize("returned", [False, True])
async def test_example_sends_transfer_params_of_llm_d(returned: bool) -> None:
    async with FakeEngine(prefilled).serving() as p, FakeEngine(answered).serving() as d:
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "examples.coordinator.ask"),
            *(f"--prefiller={p.url}", f"--decoder={d.url}", "Tell me a story."),
            *(["--returned"] if returned else []),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await program.communicate()
    assert program.returncode == 0, err
    assert (out.decode(), err.decode()) == (f"{SAID}\n", "loaded 8 of 9 tokens\n")
    (to_p,), (to_d,) = p.bodies, d.bodies
    assert to_p["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert (to_p["max_tokens"], to_p["stream"]) == (1, False)
    expected = {"do_remote_decode": False, "do_remote_prefill": True}
    kvshare = {"kvshare": {"num_tokens": 7}} if returned else {}
    assert to_d["kv_transfer_params"] == expected | kvshare
    assert to_d["messages"] == to_p["messages"]
    assert to_d["max_tokens"] > 1
