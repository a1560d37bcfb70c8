# SPDX-License-Identifier: Apache-2.0
"""Every family in E, P and D behind the router: the tokens are those of one plain engine.

Cold, nothing is stored. Warm, another router asks the same engines in exchanged roles: the one that
prefills has not loaded the embedding before, and what it is asked begins with other words, so no
stored KV covers the item.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from lab import model_cache
from lab.servers import openai_client as client
from lab.servers.engine_forks import EngineForks
from lab.servers.engines import EngineProcess, ec_argument, kv_argument
from lab.servers.processes import Server
from lab.servers.router import RouterProcess
from tests.conftest import CACHE, LOGS, engines
from tests.engines.chat import QUESTION, ask, counting, picture, sound, text, video
from tests.releases import needs_encoder_metrics

pytestmark = [pytest.mark.engine, needs_encoder_metrics]

BLOCK = 32
ENCODED, LOADED = "ecshare_items/encoded", "ecshare_items/loaded"
KV_LOADED = "kvshare_tokens/loaded"
SHOW = {"image": picture, "video": video, "audio": sound}


class Family(NamedTuple):
    told: dict[str, set[str]]
    """By modality: the metadata that E reports, and that replaces the media for P and D."""
    arguments: tuple[str, ...] = ()
    shares_kv: bool = True
    state_block: int = 0
    """For a hybrid: the tokens of a block. D computes what follows the last whole one."""
    more: str = ""
    """What is asked after the item besides the question."""

    def num_loaded(self, num_prompt_tokens: int) -> int:
        """Return how many tokens of a prompt D loads."""
        most = num_prompt_tokens - 1 if self.shares_kv else 0
        return most // self.state_block * self.state_block if self.state_block else most


STORY = "Tell me a story about the sea, the wind and the stars, and of an old stone house. " * 32
NOTHING = set[str]()
GRID = {"image_grid_thw"}
FRAMES = {"video_grid_thw", "timestamps"}
OWN_CODE = ("--trust-remote-code",)
FAMILIES = {
    "audio-flamingo3": Family({"audio": {"audio_num_tokens"}}),
    "cohere2-vision": Family({"image": NOTHING}),
    "gemma3-vl": Family({"image": NOTHING}),
    # Layers of two shapes, which CPU engines give blocks of two sizes.
    "gemma4": Family({"image": NOTHING, "video": NOTHING}, shares_kv=False),
    "glm4v": Family({"image": NOTHING, "video": NOTHING}),
    "idefics3": Family({"image": NOTHING}),
    "internvl": Family({"image": NOTHING, "video": NOTHING}),
    # The kernel for latent attention that every CPU can run cannot go on from a prefix.
    "kimi-vl": Family(
        {"image": NOTHING}, (*OWN_CODE, "--attention-backend=CPU_MLA"), shares_kv=False
    ),
    "lfm2-vl": Family({"image": NOTHING}, state_block=BLOCK),
    "llama4": Family({"image": NOTHING}),
    "llava": Family({"image": NOTHING}),
    "llava-next": Family({"image": NOTHING}),
    "llava-onevision": Family({"image": NOTHING, "video": NOTHING}),
    # It declares the sizes of pictures, but vLLM reports no lists, which its processor returns.
    "minicpmv": Family({"image": NOTHING, "video": NOTHING}, OWN_CODE),
    "mistral3": Family({"image": NOTHING}),
    "qwen2-audio": Family({"audio": {"audio_num_tokens"}}),
    "qwen2-vl": Family({"image": GRID, "video": {"video_grid_thw"}}),
    "qwen2.5-vl": Family({"image": GRID, "video": {"video_grid_thw"}}),
    "qwen3-vl": Family({"image": GRID, "video": FRAMES}),
    "qwen2.5-omni": Family(
        {"image": GRID, "video": {"video_grid_thw"}, "audio": {"audio_feature_lengths"}}
    ),
    "qwen3-omni": Family({"image": NOTHING, "video": NOTHING, "audio": {"audio_feature_lengths"}}),
    # Recurrent layers, whose kernel for CPUs wants this dtype.
    "qwen3.5-vl": Family(
        {"image": GRID, "video": FRAMES}, ("--dtype=bfloat16",), state_block=544, more=STORY
    ),
}
IN_THE_GATE = "lfm2-vl"
"""A hybrid, so that its states go through E, P and D too."""


class Fleet(NamedTuple):
    family: Family
    plain: EngineProcess
    e: EngineProcess
    p: EngineProcess
    d: EngineProcess
    router: RouterProcess
    exchanged: RouterProcess
    """Asks `d` to prefill and `p` to decode."""

    def expected(self, *content: dict[str, Any]) -> tuple[int, ...]:
        return self.asked(self.plain, *content).token_ids

    def asked(self, server: Server, *content: dict[str, Any]) -> client.Answer:
        more = [text(self.family.more)] if self.family.more else []
        body = {
            "messages": [{"role": "user", "content": [*content, *more, QUESTION]}],
            "max_tokens": 12,
            "temperature": 0,
            "return_token_ids": True,
        }
        return client.ask(server.base_url, body)


@pytest.fixture(scope="module")
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: EngineForks
) -> Iterator[Fleet]:
    """The engines of one family; they end before those of the next one start."""
    name: str = request.param
    root, logs = tmp_path_factory.mktemp(name), LOGS / f"{__name__}.{name}"
    family, store = FAMILIES[name], f"file://{root}/store"
    # The prompts of hybrids are computed in pieces that end with blocks, and vLLM's tokens differ
    # with the pieces: so all engines have blocks of one size.
    common = (
        *family.arguments,
        f"--block-size={BLOCK}",
        f"--limit-mm-per-prompt={json.dumps(dict.fromkeys(family.told, 1))}",
    )

    def stage(name: str) -> EngineProcess:
        # A host cache of its own, so its hits come from the store.
        options = {"host_cache_dir": f"{root}/{name}-host", "wait_s": 20}
        ec = ec_argument("consumer", store, **options)
        kv = kv_argument("both", store, chunk_tokens=2 * BLOCK, **options)
        of_p_and_d = ("--enable-mm-embeds", "--mm-processor-cache-gb=0")
        return start(name, *common, *of_p_and_d, ec, kv)

    with ExitStack() as stack:
        model = model_cache.model(CACHE / "models", name)
        start = stack.enter_context(engines(logs, model, forks))
        e = start("e", *common, ec_argument("producer", store, host_cache_dir=f"{root}/e-host"))
        plain, p, d = start("plain", *common), stage("p"), stage("d")
        for each in (plain, e, p, d):
            each.wait_ready()

        def router(name: str, *stages: EngineProcess) -> RouterProcess:
            by_stage = {
                stage: [engine]
                for stage, engine in zip(("encoder", "prefiller", "decoder"), stages, strict=True)
            }
            # Beside the prefiller, the decoder may answer first and nothing is loaded.
            return RouterProcess(name, logs, by_stage, ["--hand-over=after"]).start_in(stack)

        routers = router("router", e, p, d), router("exchanged", e, d, p)
        for each_router in routers:
            each_router.wait_ready()
        yield Fleet(family, plain, e, p, d, *routers)


each_family = pytest.mark.parametrize(
    "fleet",
    [
        pytest.param(name, marks=[] if name == IN_THE_GATE else [pytest.mark.models])
        for name in FAMILIES
    ],
    indirect=True,
)


@each_family
def test_stages_answer_as_a_plain_engine_cold_and_warm(fleet: Fleet) -> None:
    for modality in fleet.family.told:
        shown, other = SHOW[modality](1), SHOW[modality](2)
        check_cold(fleet, shown, other)
        check_warm(fleet, shown)


def check_cold(fleet: Fleet, shown: dict[str, Any], other: dict[str, Any]) -> None:
    with counting(fleet.e) as e, counting(fleet.p) as p, counting(fleet.d) as d:
        cold = fleet.asked(fleet.router, shown)
    assert cold.path == ("encode", "prefill", "decode")
    assert cold.token_ids == fleet.expected(shown)
    assert cold.token_ids != fleet.expected(other), "the tokens do not depend on the item: no test"
    assert (e[ENCODED], p[ENCODED], d[ENCODED]) == (1, 0, 0), f"E {dict(e)} P {dict(p)} D {dict(d)}"
    assert (p[LOADED], d[LOADED]) == (1, not fleet.family.shares_kv)
    assert d[KV_LOADED] == fleet.family.num_loaded(cold.usage["prompt_tokens"])


def check_warm(fleet: Fleet, shown: dict[str, Any]) -> None:
    words = text("Something else was asked before this.")
    with counting(fleet.e) as e, counting(fleet.p) as p, counting(fleet.d) as d:
        warm = fleet.asked(fleet.exchanged, words, shown)
    assert warm.path[-2:] == ("prefill", "decode")
    assert warm.token_ids == fleet.expected(words, shown)
    assert (e[ENCODED], p[ENCODED], d[ENCODED]) == (0, 0, 0)
    # Without KV of P, D has loaded the embedding already and still has it.
    assert (p[LOADED], d[LOADED]) == (0, fleet.family.shares_kv)


@each_family
def test_encoder_reports_the_fields_of_the_family(fleet: Fleet) -> None:
    for modality, told in fleet.family.told.items():
        uuid = f"told {modality}"
        encoded = ask(fleet.e, fleet.e.model, [SHOW[modality](3, uuid)])
        assert set(encoded.body["ec_transfer_params"][uuid]["metadata"]) == told
