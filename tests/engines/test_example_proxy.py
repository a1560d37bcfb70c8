# SPDX-License-Identifier: Apache-2.0
"""Our connectors behind vLLM's own example proxy of encode, prefill and decode.

vLLM's wheel does not have it. ECSHARE_TEST_EPD_PROXY names the file, which is in vLLM's source
distribution: examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lab.servers.engines import EngineProcess, ec_argument, kv_argument
from lab.servers.example_proxy import ExampleProxy
from tests.conftest import LOGS, StartEngine
from tests.engines.chat import QUESTION, ask, counting, picture, text

SCRIPT = os.environ.get("ECSHARE_TEST_EPD_PROXY", "")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.models,
    pytest.mark.skipif(not SCRIPT, reason="ECSHARE_TEST_EPD_PROXY names no file"),
]

STORY = text("Tell me a story about the sea, the wind and the stars. " * 8)


class Fleet(NamedTuple):
    plain: EngineProcess
    e: EngineProcess
    p: EngineProcess
    d: EngineProcess
    proxy: ExampleProxy


@pytest.fixture(scope="module")
def fleet(
    engine: StartEngine, plain: EngineProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("proxied")
    store = f"file://{root}/store"

    def sharing(name: str) -> EngineProcess:
        host = {"host_cache_dir": f"{root}/{name}-host"}
        ec, kv = ec_argument("consumer", store, **host), kv_argument("both", store, **host)
        return engine(name, ec, kv, "--enable-mm-embeds", "--mm-processor-cache-gb=0")

    e = engine("e", ec_argument("producer", store, host_cache_dir=f"{root}/e-host"))
    p, d = sharing("p"), sharing("d")
    for each in (plain, e, p, d):
        each.wait_ready()
    with ExampleProxy(Path(SCRIPT), LOGS / __name__, [e, p, d]) as proxy:
        proxy.wait_ready()
        yield Fleet(plain, e, p, d, proxy)


@pytest.mark.parametrize("pictures", [0, 1, 2])
def test_example_proxy_gives_the_plain_tokens(fleet: Fleet, pictures: int) -> None:
    shown = [picture(10 * pictures + number) for number in range(pictures)]
    content = [text(f"with {pictures}"), STORY, *shown, QUESTION]
    with counting(fleet.p) as p_gained, counting(fleet.d) as d_gained:
        answer = ask(fleet.proxy, fleet.plain.model, content)
    assert answer.tokens == ask(fleet.plain, fleet.plain.model, content).tokens
    assert p_gained["ecshare_items/loaded"] == pictures
    assert d_gained["kvshare_tokens/loaded"] == answer.num_prompt_tokens - 1


def test_repeated_prompt_is_not_computed_again(fleet: Fleet) -> None:
    content = [text("twice"), STORY, picture(31), QUESTION]
    first = ask(fleet.proxy, fleet.plain.model, content)
    with counting(fleet.e) as gained:
        again = ask(fleet.proxy, fleet.plain.model, content)
    assert gained["ecshare_items/encoded"] == 0
    assert again.tokens == first.tokens
    assert again.num_cached_tokens == again.num_prompt_tokens - 1
