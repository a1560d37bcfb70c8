# SPDX-License-Identifier: Apache-2.0
"""The choice to load a hit or to compute it, from measured loads and steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ecshare.store.keys import Kind, tp_size_key
from ecshare.transfer.jobs import Tier
from kvshare.chunks.prefix import Chunk, ChunkKey
from kvshare.scheduler.load_or_compute import LoadOrCompute, LoadTimes, UnderWay
from tests.kvshare.conftest import StartEngine
from tests.kvshare.scheduler.test_scheduler import (
    NAMESPACE,
    Bench,
    Clock,
    StartBench,
    announcing,
    bench,
    chunks_of,
)
from tests.kvshare.toy import BLOCK, expected_answer, make_request, spec, window

__all__ = ["bench"]

CHUNK = 100
FAST, SLOW = 0.0001, 0.01  # seconds per token; computing takes 0.001
TIERS = {"h": Tier.HOST, "s": Tier.STORE}


class Choice:
    """A LoadOrCompute with a simulated clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.load_or_compute = LoadOrCompute(self.clock)

    def computes(self, num_tokens: int, seconds: float, num_decoded: int = 0) -> None:
        self.load_or_compute.steps.began(num_tokens, num_decoded)
        self.clock.now_s += seconds
        self.load_or_compute.steps.ended()

    def loads(self, where: str, s_per_token: float) -> None:
        chunks, tiers = stored(where)
        seconds = len(chunks) * CHUNK * s_per_token
        self.load_or_compute.loaded(chunks, tiers, 0, seconds)

    def loaded(self, num_tokens: int, seconds: float) -> None:
        """Record a load of another chunk from the store."""
        chunk = Chunk(ChunkKey(b"other"), 0, 1, 0, num_tokens)
        self.load_or_compute.loaded([chunk], {chunk.key: Tier.STORE}, 0, seconds)

    def worth(
        self, where: str, ahead: int = 0, under_way: Sequence[UnderWay] = (), start: int = 0
    ) -> int:
        chunks, tiers = stored(where)
        return self.load_or_compute.num_worth_loading(
            chunks, tiers, start, under_way, lambda: ahead
        )


def stored(where: str) -> tuple[list[Chunk], dict[ChunkKey, Tier]]:
    """Make chunks in the tiers that the letters of `where` name; `?` was not looked up."""
    chunks = [Chunk(ChunkKey(bytes([n])), n, 1, n * CHUNK, CHUNK) for n in range(len(where))]
    pairs = zip(chunks, where, strict=True)
    tiers = {chunk.key: TIERS[letter] for chunk, letter in pairs if letter in TIERS}
    return chunks, tiers


STATE_TOKENS = 300


class StateChoice(Choice):
    """A choice for a model whose states are as many bytes as the chunks of 300 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.load_or_compute = LoadOrCompute(self.clock, STATE_TOKENS)
        self.computes(1000, 1.0)

    def loads_with_state(self, where: str, s_per_token: float) -> None:
        chunks, tiers = with_state(where)
        seconds = ((len(chunks) - 1) * CHUNK + STATE_TOKENS) * s_per_token
        self.load_or_compute.loaded(chunks, tiers, 0, seconds)

    def worth_with_state(self, where: str, ahead: int = 0, start: int = 0) -> int:
        chunks, tiers = with_state(where)
        return self.load_or_compute.num_worth_loading(chunks, tiers, start, (), lambda: ahead)


def with_state(where: str) -> tuple[list[Chunk], dict[ChunkKey, Tier]]:
    """Make chunks as `stored` does; the last letter is of the state."""
    chunks, tiers = stored(where)
    last = chunks[-2]
    chunks[-1] = replace(chunks[-1], start_tokens=last.start_tokens, is_state=True)
    return chunks, tiers


@pytest.mark.parametrize("where", ["sss", "s" * 11, "s" * 31])
def test_first_hit_with_a_state_is_loaded_as_a_whole(where: str) -> None:
    assert StateChoice().worth_with_state(where) == len(where)


@pytest.mark.parametrize(
    ("num_chunks", "is_loaded"),
    # Per token 0.4 ms to load and 1 ms to compute: a state pays if 0.4 (n + 300) < n.
    [(1, False), (2, True), (20, True)],
)
def test_state_counts_as_bytes_to_load_and_not_as_tokens(num_chunks: int, is_loaded: bool) -> None:  # noqa: FBT001
    choice = StateChoice()
    choice.loads_with_state("s" * 21, 0.0004)
    choice.loads_with_state("s" * 41, 0.0004)
    where = "s" * num_chunks + "s"
    assert choice.worth_with_state(where) == (len(where) if is_loaded else 0)


def test_hit_with_a_state_is_never_loaded_in_part() -> None:
    """Half of it is on this host, and the store is slow: without a state, that half is loaded."""
    choice = StateChoice()
    choice.loads("s" * 10, SLOW)
    choice.loads("h" * 10, FAST)
    assert choice.worth("hhhhhsssss") == 5
    assert choice.worth_with_state("hhhhhssssss") == 0
    assert choice.worth_with_state("hhhhhhhhhhh") == 11


def test_slow_store_is_tried_again_with_a_whole_hit() -> None:
    choice = StateChoice()
    choice.loads_with_state("s" * 11, SLOW)
    assert choice.worth_with_state("s" * 11) == 0
    choice.clock.now_s += 31
    assert choice.worth_with_state("s" * 11) == 11
    assert choice.worth_with_state("s" * 11) == 0


def test_state_is_computed_while_the_compute_time_is_unknown_if_loads_take_long() -> None:
    choice = StateChoice()
    choice.load_or_compute = LoadOrCompute(choice.clock, STATE_TOKENS)
    choice.loads_with_state("s" * 11, SLOW)
    assert choice.worth_with_state("s" * 11) == 0


@pytest.fixture
def choice() -> Choice:
    """Make a choice that has measured its engine's compute speed."""
    made = Choice()
    made.computes(1000, 1.0)
    return made


def test_hit_is_loaded_while_speeds_are_unknown(choice: Choice) -> None:
    assert Choice().worth("ssss") == 4
    assert choice.worth("ssss") == 4
    assert choice.worth("") == 0
    new = Choice()
    new.loads("ss", FAST)
    assert new.worth("ssss") == 4


@pytest.mark.parametrize(("pace", "expected"), [(FAST, 4), (0.00099, 4), (0.00101, 0), (SLOW, 0)])
def test_hit_is_loaded_if_loading_is_faster(choice: Choice, pace: float, expected: int) -> None:
    choice.loads("ss", pace)
    assert choice.worth("ssss") == expected


@pytest.mark.parametrize(
    ("where", "expected"), [("hhss", 2), ("ssss", 0), ("hhhh", 4), ("?hss", 2), ("h?s?", 1)]
)
def test_host_part_of_a_hit_is_loaded_although_the_store_is_slow(
    choice: Choice, where: str, expected: int
) -> None:
    choice.loads("hh", FAST)
    choice.loads("ss", SLOW)
    assert choice.worth(where) == expected


@pytest.mark.parametrize("where", ["s??h", "h??s", "?ssh"])
def test_unprobed_chunks_between_store_and_host_count_as_store(choice: Choice, where: str) -> None:
    """A host cache may hold the end of a prompt alone: it evicts the least recently opened."""
    choice.loads(
        where, 0.0007
    )  # less than computing a token takes, even if three chunks are the store's
    assert choice.worth("ssss") == 4


def test_unprobed_chunks_at_the_end_have_the_tier_of_the_last_probed(choice: Choice) -> None:
    choice.loads("ss", SLOW)
    choice.loads("hh", FAST)
    assert choice.worth("hh??") == 4
    assert choice.worth("ss??") == 0


@pytest.mark.parametrize("start", [CHUNK, 2 * CHUNK])
def test_chunks_inside_a_grown_local_hit_are_not_timed(choice: Choice, start: int) -> None:
    """The local hit may grow between lookup and load; blocks inside it are not loaded."""
    chunks, tiers = stored("sshh"[2 - start // CHUNK :])
    choice.load_or_compute.loaded(chunks, tiers, start, 100.0)
    assert choice.worth("ssss") == 4, "the store is unmeasured"
    assert choice.worth("hhhh") == 0, "the host was measured"
    choice.load_or_compute.loaded(chunks, tiers, len(chunks) * CHUNK, 100.0)  # nothing
    assert choice.worth("s", start=CHUNK) == 0


def test_load_is_cheaper_while_other_prompts_are_computed(choice: Choice) -> None:
    choice.loads("ss", 2 * 0.001)
    assert choice.worth("ssss", ahead=300) == 0
    assert choice.worth("ssss", ahead=400) == 4


def test_overdue_running_load_already_slows_the_estimate(choice: Choice) -> None:
    choice.loads("ss", FAST)
    assert choice.worth("ssss", under_way=[(400, 0.3)]) == 4
    assert choice.worth("ssss", under_way=[(400, 0.3), (400, 0.5)]) == 0
    assert choice.worth("hhss", under_way=[(400, 0.5)]) == 2
    assert choice.worth("ssss") == 4


@pytest.mark.parametrize("under_way", [(32, 0.040), (200, 0.080)])
def test_running_small_load_hardly_changes_the_estimate_of_large_ones(under_way: UnderWay) -> None:
    """It is dominated by the round trip, which hardly matters to a large load."""
    choice = Choice()
    choice.computes(3000, 1.0)
    choice.loaded(7936, 0.5)
    assert choice.worth(79 * "s", under_way=[under_way]) == 79


@pytest.mark.parametrize("num_prompts", [1, 99])
def test_small_loads_hardly_change_the_estimate_of_large_ones(num_prompts: int) -> None:
    choice = Choice()
    choice.computes(8000, 0.8)
    for _ in range(num_prompts):
        choice.loaded(300, 0.060)
    choice.loaded(7900, 0.6)
    assert choice.worth(79 * "s") == 79
    assert choice.worth("sss") == 0, "small ones are computed sooner"


def test_latency_counts_once_for_a_hit_in_several_tiers(choice: Choice) -> None:
    for num_tokens in (100, 10_000):
        choice.loaded(num_tokens, 0.2 + FAST * num_tokens)
    choice.loads("hh", FAST)
    assert choice.worth("s") == 0
    assert choice.worth("sss") == 3
    assert choice.worth("shs") == 3
    assert choice.worth("hhhhs") == 4


def test_unmeasured_store_gets_one_small_load(
    choice: Choice,
) -> None:
    for unknown in (choice, Choice()):
        assert unknown.worth(20 * "s") == 10
        assert unknown.worth(20 * "s", start=150) == 11
        assert unknown.worth("hh" + 20 * "s") == 12
        assert unknown.worth(20 * "h") == 20
        assert unknown.worth("hh" + 20 * "s", under_way=[(1000, 0.0)]) == 2
        unknown.loads("ss", FAST)
        assert unknown.worth(20 * "s") == 20


def test_unmeasured_store_gets_at_least_one_chunk(choice: Choice) -> None:
    chunk = Chunk(ChunkKey(b"large"), 0, 1, 0, 4096)
    args = [chunk], {chunk.key: Tier.STORE}, 0, (), lambda: 0
    assert choice.load_or_compute.num_worth_loading(*args) == 1


def test_engine_that_never_computed_still_limits_slow_loads() -> None:
    choice = Choice()
    choice.loads("ss", 0.004)
    assert choice.worth("ssss") == 2  # as many as arrive within a second
    assert choice.worth("hhsss") == 4
    assert choice.worth("ssss", under_way=[(100, 2.0)]) == 0
    choice.computes(200, 0.2)
    assert choice.worth("ssss") == 0
    other = Choice()
    for num_tokens in (100, 8000):
        other.loaded(num_tokens, 2.0)
    assert other.worth("ssss") == 0


# --- the line through the times of loads ---


def line_of(*loads: tuple[int, float], clock: Clock | None = None) -> tuple[float, float]:
    times = LoadTimes(clock or Clock())
    for load in loads:
        times.add(*load)
    assert times.line is not None
    return times.line.latency_s, times.line.s_per_token


def test_line_separates_latency_and_time_per_token() -> None:
    loads = [(n, 0.05 + n * FAST) for n in (200, 300, 4000, 8000, 8000)]
    latency_s, s_per_token = line_of(*loads)
    assert latency_s == pytest.approx(0.05, rel=0.05)
    assert s_per_token == pytest.approx(FAST, rel=0.05)


def test_line_through_loads_of_one_size_has_no_latency() -> None:
    assert line_of((300, 0.06), (300, 0.06)) == pytest.approx((0.0, 0.0002))


def test_latency_and_time_per_token_are_never_negative() -> None:
    latency_s, s_per_token = line_of((100, 1.0), (8000, 0.1), (8000, 0.1))
    assert s_per_token == 0.0
    assert latency_s > 0.1
    assert line_of((100, 0.001), (8000, 2.0)) == pytest.approx((0.0, 2.001 / 8100))


def test_old_large_load_does_not_outweigh_recent_small_ones() -> None:
    """The store may have become slow in the meantime."""
    clock = Clock()
    times = LoadTimes(clock)
    times.add(8000, 0.5)
    clock.now_s += 60.0
    for _ in range(5):
        times.add(300, 2.0)
    assert times.line is not None
    assert times.line.seconds(8000) > 40.0


def test_slow_tier_is_probed_every_30_s_and_recovers(choice: Choice) -> None:
    choice.loads("ss", SLOW)
    for _ in range(29):
        assert choice.worth("ssss") == 0
        choice.clock.now_s += 1.0
    choice.clock.now_s += 1.0
    assert choice.worth("sss") == 2  # as many as arrive within two seconds
    assert choice.worth("ssss") == 0  # one probe at a time
    choice.loads("ss", FAST)
    assert choice.worth("ssss") == 4


def test_probe_of_a_slow_tier_loads_at_least_one_chunk(choice: Choice) -> None:
    choice.loads("ss", 10.0)
    choice.loads("hh", FAST)
    choice.clock.now_s += 30.0
    assert choice.worth("hhss") == 3


def test_recent_load_times_replace_old_ones(choice: Choice) -> None:
    for pace, expected in ((SLOW, 0), (FAST, 4), (SLOW, 0)):
        choice.clock.now_s += 60.0
        choice.loads("ss", pace)
        assert choice.worth("ssss") == expected


def test_steps_with_few_prompt_tokens_are_not_measured() -> None:
    choice = Choice()
    choice.loads("ss", 0.001)
    choice.computes(63, 63.0)
    choice.computes(300, 300.0, num_decoded=200)
    choice.computes(0, 1.0)
    assert choice.load_or_compute.steps.pace.s_per_token is None
    choice.computes(300, 3.0, num_decoded=100)
    assert choice.load_or_compute.steps.pace.s_per_token == pytest.approx(0.01)


def test_overlapping_steps_are_timed_from_the_end_of_the_former() -> None:
    """With asynchronous scheduling two are in flight."""
    choice = Choice()
    steps = choice.load_or_compute.steps
    steps.began(1, 1)
    steps.began(1000, 0)
    choice.clock.now_s += 5.0
    steps.ended()
    steps.began(1, 1)
    choice.clock.now_s += 1.0
    steps.ended()
    choice.clock.now_s += 5.0
    steps.ended()
    assert steps.pace.s_per_token == pytest.approx(0.001)


def test_empty_step_is_not_mistaken_for_a_computing_one() -> None:
    """Its output comes at once, while the computing step still runs."""
    choice = Choice()
    steps = choice.load_or_compute.steps
    steps.began(0, 0)
    choice.clock.now_s += 5.0
    steps.began(1000, 0)
    choice.clock.now_s += 0.002
    steps.ended()
    steps.began(0, 0)
    choice.clock.now_s += 0.998
    steps.ended()
    steps.ended()
    assert steps.pace.s_per_token == pytest.approx(0.001)


def test_compute_speed_is_the_median_weighted_by_tokens(choice: Choice) -> None:
    pace = choice.load_or_compute.steps.pace
    for _ in range(14):
        choice.computes(1000, 1.0)
    for _ in range(7):
        choice.computes(1000, 0.002)
    assert pace.s_per_token == pytest.approx(0.001)
    choice.computes(1000, 0.002)
    assert pace.s_per_token == pytest.approx(0.000002)
    choice.computes(8000, 8.0)
    assert pace.s_per_token == pytest.approx(0.001), "a step of many tokens weighs more"


def test_hits_are_loaded_if_vllm_does_not_report_step_ends(choice: Choice) -> None:
    """Late reports count for much older steps, so computing seems slow."""
    choice.loads("ss", 0.002)
    assert choice.worth("ssss") == 0
    for _ in range(1000):
        choice.load_or_compute.steps.began(1000, 0)
        choice.clock.now_s += 1.0
    choice.load_or_compute.steps.ended()
    assert choice.worth("ssss") == 4


# --- through the hooks of the scheduler half ---

PROMPT = list(range(100 * BLOCK + 1))
NEW = list(range(1000, 1000 + 80))


def compute(here: Bench, name: str, seconds: float) -> None:
    new = make_request(name, NEW)
    assert here.ask(new) == 0
    here.run(new, 0, len(NEW), list(range(200, 220)))
    here.clock.now_s += seconds
    here.half.step_ended()
    here.half.finished(new)


def load(here: Bench, name: str, seconds: float) -> int:
    """Load as many tokens of PROMPT as a request may; return how many."""
    asked = make_request(name, PROMPT)
    num_tokens = here.ask(asked)
    if num_tokens:
        here.half.allocated(asked, [list(range(101))], num_tokens)
        here.clock.now_s += seconds
        here.half.reported(KVConnectorOutput(finished_recving={name}))
    here.half.finished(asked)
    return num_tokens


def slow_store(bench: StartBench, **options: Any) -> Bench:
    """Make a half whose engine computes a token in 1 ms and whose last load took 100 s."""
    here = bench(options=options)
    here.put(chunks_of(PROMPT))
    here.forget_host_cache()
    compute(here, "new", 0.080)
    assert load(here, "first", 100.0) == 400
    here.half.take_stats()
    return here


def fast_store(bench: StartBench) -> Bench:
    """Make a half whose engine computes a token in 1 ms and loads one in an eighth of that."""
    here = bench()
    here.put(chunks_of(PROMPT))
    here.forget_host_cache()
    compute(here, "new", 0.080)
    assert load(here, "measured", 0.050) == 400
    return here


def test_hit_is_computed_if_the_store_is_slower(bench: StartBench) -> None:
    here = slow_store(bench)
    assert load(here, "second", 100.0) == 0
    assert load(here, "third", 100.0) == 0
    stats = here.half.take_stats()
    assert stats is not None
    assert stats.data["tokens/computed"] == 2 * 400
    assert "tokens/hit" not in stats.data


def test_decision_for_a_request_does_not_change(bench: StartBench) -> None:
    here = slow_store(bench)
    asked = make_request("second", PROMPT)
    assert here.ask(asked) == 0
    here.clock.now_s += 100.0
    assert here.ask(asked) == 0


def test_load_always_loads_from_a_slow_store(bench: StartBench) -> None:
    assert load(slow_store(bench, load="always"), "second", 100.0) == 400


def test_announced_tokens_are_loaded_from_a_slow_store(bench: StartBench) -> None:
    here = slow_store(bench)
    assert here.ask(announcing(PROMPT, 400, name="d")) == 400


def begin(here: Bench, name: str, prompt: list[int]) -> None:
    """Begin to load as much of `prompt` as the half offers."""
    asked = make_request(name, prompt)
    here.half.allocated(asked, [list(range(101))], here.ask(asked))


def test_overdue_load_makes_other_requests_compute(bench: StartBench) -> None:
    here = fast_store(bench)
    begin(here, "first", PROMPT)
    assert here.ask(make_request("second", PROMPT)) == 400
    here.clock.now_s += 100.0
    for name in ("third", "fourth"):
        assert here.ask(make_request(name, PROMPT)) == 0


def test_running_small_load_makes_no_request_compute(bench: StartBench) -> None:
    here = fast_store(bench)
    begin(here, "small", PROMPT[: BLOCK + 1])
    here.clock.now_s += 0.040
    assert here.ask(make_request("large", PROMPT)) == 400


def test_first_load_makes_other_requests_compute(bench: StartBench) -> None:
    here = bench()
    here.put(chunks_of(PROMPT))
    here.forget_host_cache()
    begin(here, "first", PROMPT)
    assert here.ask(make_request("second", PROMPT)) == 0
    here.half.reported(KVConnectorOutput(finished_recving={"first"}))
    assert here.ask(make_request("third", PROMPT)) == 400


def test_hit_is_loaded_while_many_tokens_wait_to_be_computed(bench: StartBench) -> None:
    here = slow_store(bench)
    before = make_request("before", list(range(5000, 5000 + 500 * 250)))
    here.ask(before)
    assert here.ask(make_request("second", PROMPT)) == 400


def test_only_blocks_behind_a_grown_local_hit_count_as_loaded(bench: StartBench) -> None:
    """Another request computed the first block, which was in the store alone, in the meantime."""
    here = bench()
    prompt = PROMPT[: 3 * BLOCK + 1]
    first, *others = chunks_of(prompt)
    here.put([first])
    here.forget_host_cache()
    here.put(others)
    compute(here, "new", 0.080)
    asked = make_request("asked", prompt)
    assert here.ask(asked) == 3 * BLOCK
    assert here.ask(asked, BLOCK) == 2 * BLOCK
    here.half.allocated(asked, [list(range(4))], 2 * BLOCK)
    here.clock.now_s += 1.0
    here.half.reported(KVConnectorOutput(finished_recving={"asked"}))
    stats = here.half.take_stats()
    assert stats is not None
    assert stats.data["tokens/loaded"] == 2 * BLOCK


# --- too few tokens for a lookup ---


@pytest.fixture
def computing(bench: StartBench) -> StartBench:
    """Start halves whose engine computes five tokens in the time of a lookup and a load."""

    def start(**more: Any) -> Bench:
        here = bench(**more)
        here.put(chunks_of(PROMPT, more.get("chunk_blocks", 1)))
        compute(here, "new", 0.076)
        here.engine.drain(20.0)
        return here

    return start


def with_left(num_left: int, **more: Any) -> Request:
    """Make a request with `num_left` loadable tokens behind its two local blocks."""
    return make_request(f"{num_left} left", PROMPT[: 2 * BLOCK + num_left + 1], **more)


def is_looked_up(here: Bench, request: Request) -> bool:
    """Return whether `request`, whose first two blocks are local, waits for a lookup."""
    return here.half.num_loadable_tokens(request, 2 * BLOCK) is None


@pytest.mark.parametrize(("num_left", "expected"), [(1, False), (4, False), (5, True)])
def test_few_missing_tokens_are_computed_without_a_lookup(
    computing: StartBench, num_left: int, expected: bool
) -> None:
    here = computing(chunk_blocks=4)
    assert is_looked_up(here, with_left(num_left)) is expected
    assert here.engine.in_flight == expected


def test_a_missing_whole_chunk_is_always_looked_up(computing: StartBench) -> None:
    here = computing()
    for name in ("faster", "as fast"):
        compute(here, name, 0.001)
    assert not is_looked_up(here, with_left(BLOCK - 1))
    assert is_looked_up(here, with_left(BLOCK))


def test_few_tokens_are_looked_up_if_always_loading_or_unmeasured(
    computing: StartBench, bench: StartBench
) -> None:
    for here in (computing(options={"load": "always"}), bench()):
        assert is_looked_up(here, with_left(1))


@pytest.mark.parametrize(("offset", "expected"), [(0, False), (1, True)])
def test_few_tokens_are_looked_up_if_an_image_would_be_encoded(
    computing: StartBench, offset: int, expected: bool
) -> None:
    """Its request may have come without pixels."""
    place = PlaceholderRange(offset=offset, length=2 * BLOCK)
    picture = MultiModalFeatureSpec(data=None, modality="image", identifier="p", mm_position=place)
    assert is_looked_up(computing(), with_left(1, mm_features=[picture])) is expected


@pytest.mark.parametrize(("num_left", "expected"), [(BLOCK - 1, 0), (BLOCK, BLOCK)])
def test_announced_block_is_loaded_but_less_than_a_block_is_computed(
    computing: StartBench, num_left: int, expected: int
) -> None:
    here = computing(chunk_blocks=4)
    request = announcing(PROMPT[: 2 * BLOCK + num_left + 1])
    assert here.half.num_loadable_tokens(request, 2 * BLOCK) == expected


def test_announced_block_of_unknown_tp_size_is_looked_up(
    computing: StartBench,
) -> None:
    here = computing(chunk_blocks=4, other_tp_sizes={2: ("t0of2", "t1of2")})
    here.put_keys(tp_size_key(Kind.KV, NAMESPACE, 2))
    here.clock.now_s += 60.0  # marks are read at intervals
    here.half.learn_tp_sizes(20.0)
    assert is_looked_up(here, announcing(PROMPT[: 3 * BLOCK + 1]))


# --- through an engine ---


@pytest.mark.parametrize("num_loaded", range(6))
@pytest.mark.parametrize("specs", [(), (spec(), window(2 * BLOCK))], ids=["full", "window"])
def test_prefix_worth_loading_is_loaded_and_the_rest_computed(
    start: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    specs: Sequence[KVCacheSpec],
    num_loaded: int,
) -> None:
    prompt = list(range(5 * BLOCK + 1))
    start(specs=specs).run(make_request("p", prompt))
    monkeypatch.setattr(LoadOrCompute, "num_worth_loading", lambda *_: num_loaded)
    engine = start(specs=specs, store={"load": "if_faster"})
    (answer,) = engine.run(make_request("d", prompt, 3))
    assert answer.tokens == expected_answer(prompt, 3, engine.windows)
    assert answer.computed_prompt_tokens == len(prompt) - num_loaded * BLOCK
    assert engine.counts.get("tokens/computed", 0) == (5 - num_loaded) * BLOCK
    assert engine.counts.get("tokens/loaded", 0) == num_loaded * BLOCK


def test_load_of_no_token_does_not_fail() -> None:
    """Its chunks have become local since the lookup, so there is nothing to time."""
    for where in ("sh", "ssh", "s"):
        choice = LoadOrCompute(Clock())
        chunks, tiers = stored(where)
        for start in (where.count("s") * CHUNK, where.count("s") * CHUNK + BLOCK):
            choice.loaded(chunks, tiers, start, 0.1)
