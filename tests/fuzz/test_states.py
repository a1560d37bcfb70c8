# SPDX-License-Identifier: Apache-2.0
"""Damaged and forged objects of states: an engine computes the prompt, and its tokens are right."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecshare.store.errors import ObjectCorrupt
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal, unseal
from tests.fuzz.running import fuzzed
from tests.fuzz.test_objects import DAMAGE, Draw, Sound
from tests.kvshare.toy import (
    BLOCK,
    ToyEngine,
    hybrid,
    objects,
    options,
    serve,
    vllm_config,
    write_model,
)
from tests.releases import needs_offered_states

pytestmark = [pytest.mark.fuzz, needs_offered_states]

PROMPT = list(range(100, 100 + 5 * BLOCK + 3))
END = 5 * BLOCK
STATE = "-s"  # in the names of their objects


class Stored(NamedTuple):
    """A store with the states of two prompts."""

    model: Path
    folder: Path
    last: Path
    """The object of the state that PROMPT is loaded with."""
    others: list[bytes]
    """Those of an earlier boundary of PROMPT, and of the other prompt."""

    @property
    def key(self) -> str:
        return str(self.last.relative_to(self.folder / "store"))

    @contextmanager
    def engine(self, role: str = "kv_both") -> Iterator[ToyEngine]:
        """An engine with an empty host cache."""
        shutil.rmtree(self.folder / "host", ignore_errors=True)
        engine = ToyEngine(
            vllm_config(
                self.model,
                options(self.folder),
                role,
                max_num_batched_tokens=3 * BLOCK,
                max_num_seqs=3,
            ),
            specs=hybrid(2),
        )
        try:
            yield engine
        finally:
            engine.close()

    def num_computed(self, raw: bytes) -> int:
        """Return how many tokens of PROMPT an engine computes if its state is `raw`."""
        sound = self.last.read_bytes()
        self.last.write_bytes(raw)
        try:
            with self.engine("kv_consumer") as reader:
                num_computed = serve(reader, PROMPT).computed_prompt_tokens
                # An error of the copy to the blocks, which nothing may reach that is not a state.
                assert not reader.counts.get("misses/unavailable")
                return num_computed
        finally:
            self.last.write_bytes(sound)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    folder = tmp_path_factory.mktemp("stored")
    here = Stored(write_model(folder / "model"), folder, folder, [])
    with here.engine() as writer:
        serve(writer, PROMPT, max_tokens=1, name="ours")
        ours = set(objects(folder))
        serve(writer, [7, *PROMPT[1:]], max_tokens=1, name="others")
    states = [path for path in objects(folder) if STATE in path.name]
    for path in states:
        moved = path.with_suffix(".moved")
        path.rename(moved)
        with here.engine("kv_consumer") as reader:
            is_last = serve(reader, PROMPT).computed_prompt_tokens > len(PROMPT) - END
        moved.rename(path)
        if path in ours and is_last:
            rest = [other.read_bytes() for other in states if other != path]
            assert len(rest) == len(states) - 1 >= 3
            return Stored(here.model, folder, path, rest)
    raise AssertionError("no state is loaded")


# --- well-formed objects under the right name that no engine would store there ---


def of_another_size(draw: Draw, facts: TensorSpec) -> TensorSpec:
    size = facts.shape[-1] + draw(st.sampled_from([-8, -1, 1, 8, 4096]))
    return TensorSpec(facts.dtype, (*facts.shape[:-1], size), facts.attributes)


def of_another_shape(draw: Draw, facts: TensorSpec) -> TensorSpec:
    shape = draw(st.permutations(facts.shape).filter(lambda each: tuple(each) != facts.shape))
    return TensorSpec(facts.dtype, tuple(shape), facts.attributes)


def of_another_dtype(draw: Draw, facts: TensorSpec) -> TensorSpec:
    return TensorSpec(draw(st.sampled_from(["I8", "BOOL"])), facts.shape, facts.attributes)


def of_another_boundary(draw: Draw, facts: TensorSpec) -> TensorSpec:
    """Or with other attributes that say how it is read."""
    name = draw(st.sampled_from(sorted(facts.attributes)))
    value = draw(st.sampled_from([0, 1, -1, 2, BLOCK - 1, 1 << 40, "x", None, [1]]))
    attributes = {**facts.attributes, name: value}
    if draw(st.booleans()):
        del attributes[name]
    return TensorSpec(facts.dtype, facts.shape, attributes)


Facts = Callable[[Draw, TensorSpec], TensorSpec]
FACTS: list[Facts] = [of_another_size, of_another_shape, of_another_dtype, of_another_boundary]


def resealed(key: str, facts: TensorSpec, payload: bytes) -> bytes:
    body = payload[: facts.num_bytes].ljust(facts.num_bytes, b"\0")
    raw = bytearray(PROLOGUE_BYTES) + body
    seal(memoryview(raw), facts, key)
    return bytes(raw)


def sound_of(stored: Stored) -> Sound:
    raw = stored.last.read_bytes()
    return Sound(raw, unseal(memoryview(raw), stored.key).spec, None)


def is_refused(key: str, raw: bytes, facts: TensorSpec) -> bool:
    try:
        return unseal(memoryview(raw), key).spec != facts
    except ObjectCorrupt:
        return True


def test_sound_state_is_loaded(stored: Stored) -> None:
    sound = sound_of(stored)
    assert stored.num_computed(sound.raw) == len(PROMPT) - END
    again = resealed(stored.key, sound.facts, sound.payload)
    assert stored.num_computed(again) == len(PROMPT) - END


@fuzzed(12)
@given(st.data())
def test_damaged_state_is_a_miss(stored: Stored, data: st.DataObject) -> None:
    sound = sound_of(stored)
    raw = data.draw(st.sampled_from(DAMAGE))(data.draw, sound)
    num_computed = stored.num_computed(raw)
    # Few changes change nothing that counts, such as spaces in the header.
    assert num_computed == len(PROMPT) or not is_refused(stored.key, raw, sound.facts)


def with_one_wrong_fact(facts: TensorSpec) -> Iterator[TensorSpec]:
    """Yield `facts` with each attribute missing or changed, each axis longer, shorter or in the
    place of another one, and another dtype."""
    for name, value in facts.attributes.items():
        others = {key: each for key, each in facts.attributes.items() if key != name}
        changed = value + 1 if isinstance(value, int) else f"{value}x"
        yield TensorSpec(facts.dtype, facts.shape, others)
        yield TensorSpec(facts.dtype, facts.shape, {**others, name: changed})
    shapes = set(permutations(facts.shape))
    for axis, size in enumerate(facts.shape):
        for other in (size - 1, size + 1):
            shapes.add((*facts.shape[:axis], other, *facts.shape[axis + 1 :]))
    for shape in sorted(shapes - {tuple(facts.shape)}):
        if all(shape):
            yield TensorSpec(facts.dtype, shape, facts.attributes)
    yield TensorSpec("I8", facts.shape, facts.attributes)


def test_state_with_one_wrong_fact_is_a_miss(stored: Stored) -> None:
    sound = sound_of(stored)
    for facts in with_one_wrong_fact(sound.facts):
        raw = resealed(stored.key, facts, sound.payload)
        assert stored.num_computed(raw) == len(PROMPT), facts


@fuzzed(12)
@given(st.data())
def test_state_with_facts_of_no_state_is_a_miss(stored: Stored, data: st.DataObject) -> None:
    sound = sound_of(stored)
    facts = data.draw(st.sampled_from(FACTS))(data.draw, sound.facts)
    raw = resealed(stored.key, facts, sound.payload)
    num_computed: Any = stored.num_computed(raw)
    assert num_computed == len(PROMPT) or facts == sound.facts


@fuzzed(6)
@given(st.data())
def test_state_of_another_prompt_or_boundary_is_a_miss(stored: Stored, data: st.DataObject) -> None:
    assert stored.num_computed(data.draw(st.sampled_from(stored.others))) == len(PROMPT)
