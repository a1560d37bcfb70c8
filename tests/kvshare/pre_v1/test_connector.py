# SPDX-License-Identifier: Apache-2.0
"""A decoder split into two processes by the connector from before V1."""

import copy
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.sequence import IntermediateTensors

from kvshare.pre_v1.connector import KVConnectorBase, KVShareLegacyConnector
from tests.kvshare.decoder import (
    Decoder,
    batch,
    decode,
    fresh_caches,
    last_hidden,
    prefill,
)
from tests.kvshare.toy import options, vllm_config

ONE, TWO, THREE = list(range(3, 20)), list(range(40, 49)), [7, 3, 7, 3, 5]
UNKNOWN = list(range(60, 71))

Prompts = Sequence[Sequence[int]]
Connect = Callable[..., KVShareLegacyConnector]


@pytest.fixture
def connect(text_model: Path, tmp_path: Path) -> Iterator[Connect]:
    started = []

    def connect(role: str = "kv_both", rank: int = 0, **more: Any) -> KVShareLegacyConnector:
        config = vllm_config(text_model, options(tmp_path, **more), role)
        started.append(KVShareLegacyConnector(rank, rank, config))
        return started[-1]

    yield connect
    for connector in started:
        connector.close()


def prefill_elsewhere(text_model: Path, tmp_path: Path, *batches: Prompts) -> dict[str, int]:
    """Compute and send these batches in another process; return its counters."""
    job = tmp_path / "job.json"
    arguments = {"model": str(text_model), "options": options(tmp_path), "batches": batches}
    job.write_text(json.dumps(arguments))
    command = [sys.executable, "-m", "tests.kvshare.decoder", str(job)]
    ran = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False
    )
    assert ran.returncode == 0, ran.stderr
    counters: dict[str, int] = json.loads(ran.stdout.splitlines()[-1])
    return counters


def computed_locally(prompts: Prompts) -> tuple[Tensor, list[list[int]]]:
    """Return the hidden states and the answers of a decoder in one process."""
    model, caches, given = Decoder(), fresh_caches(), batch(*prompts)
    hidden = model(given, caches)
    return hidden, decode(model, caches, prompts, last_hidden(hidden, given))


def receive(
    connector: KVConnectorBase, prompts: Prompts, caches: list[Tensor]
) -> tuple[Any, bool, Any]:
    return connector.recv_kv_caches_and_hidden_states(Decoder(), batch(*prompts), caches)


def answers(
    prompts: Prompts, caches: list[Tensor], received: tuple[Any, bool, Any]
) -> list[list[int]]:
    """Return the answers, decoded after `received` as a model runner does."""
    hidden, is_bypassed, adjusted = received
    model = Decoder()
    if not is_bypassed:
        assert hidden is None
        hidden = model(adjusted, caches)
    return decode(model, caches, prompts, last_hidden(hidden, adjusted))


def test_a_bypassed_step_gives_the_same_states_and_tokens(
    connect: Connect, text_model: Path, tmp_path: Path
) -> None:
    prompts = [ONE, TWO, THREE]
    counters = prefill_elsewhere(text_model, tmp_path, [THREE], [TWO, ONE])
    assert counters == {"inserted": 3, "prompts/sent": 3}
    connector, caches = connect("kv_consumer"), fresh_caches()
    received = receive(connector, prompts, caches)
    hidden, is_bypassed, _ = received
    expected_hidden, expected = computed_locally(prompts)
    assert is_bypassed
    assert torch.allclose(hidden, expected_hidden, atol=1e-6)
    assert answers(prompts, caches, received) == expected
    assert connector.counters == {"taken": 3, "prompts/received": 3}
    assert receive(connector, prompts, fresh_caches())[1] is False, "each is received once"


@pytest.mark.parametrize(
    ("sent", "num_left"),
    [
        ([TWO], 17 + 1 + 5),  # one of three: its last token is computed again
        ([ONE[:10], TWO, THREE], 7 + 1 + 1),  # one entry is a prefix of its prompt
        ([[*ONE, 1, 2, 3], TWO], 1 + 1 + 5),  # one entry is longer than its prompt
        ([UNKNOWN], 17 + 9 + 5),
    ],
)
def test_rest_of_a_partial_hit_is_computed(connect: Connect, sent: Prompts, num_left: int) -> None:
    prompts = [ONE, TWO, THREE]
    prefill(connect("kv_producer"), [sent])
    caches = fresh_caches()
    received = receive(connect("kv_consumer"), prompts, caches)
    _, is_bypassed, adjusted = received
    assert not is_bypassed
    attention = adjusted.attn_metadata
    assert len(adjusted.input_tokens) == attention.num_prefill_tokens == num_left
    assert len(adjusted.input_positions) == len(attention.slot_mapping) == num_left
    assert attention.seq_lens == [17, 9, 5]
    lengths = attention.query_start_loc.diff()
    assert (attention.context_lens_tensor + lengths).tolist() == [17, 9, 5]
    assert attention.max_query_len == int(lengths.max())
    assert adjusted.query_lens == lengths.tolist()
    assert [group.query_len for group in adjusted.sampling_metadata.seq_groups] == lengths.tolist()
    assert answers(prompts, caches, received) == computed_locally(prompts)[1]


def test_model_input_of_the_runner_is_not_changed(connect: Connect, tmp_path: Path) -> None:
    connector, model, caches = connect(), Decoder(), fresh_caches()
    given = batch(TWO)
    connector.send_kv_caches_and_hidden_states(model, given, caches, model(given, caches))
    asked = batch(ONE, TWO)
    before = copy.deepcopy(asked)
    adjusted = connector.recv_kv_caches_and_hidden_states(model, asked, fresh_caches())[2]
    assert len(adjusted.input_tokens) == 18
    assert repr(asked) == repr(before)
    assert adjusted.attn_metadata._cached_prefill_metadata is None
    assert adjusted.attn_metadata._cached_decode_metadata is None
    assert asked.input_tokens.tolist() == [*ONE, *TWO]
    assert asked.attn_metadata.num_prefill_tokens == 26
    assert asked.attn_metadata.query_start_loc.tolist() == [0, 17, 26]


def test_a_longer_entry_bypasses_a_shorter_prompt(connect: Connect) -> None:
    connector, model, caches = connect(), Decoder(), fresh_caches()
    given = batch([*ONE, 1, 2, 3])
    connector.send_kv_caches_and_hidden_states(model, given, caches, model(given, caches))
    caches = fresh_caches()
    received = receive(connector, [ONE], caches)
    assert received[1]
    assert answers([ONE], caches, received) == computed_locally([ONE])[1]


def test_decodes_are_not_sent_and_keep_the_model_running(connect: Connect) -> None:
    connector, model, caches = connect(), Decoder(), fresh_caches()
    given = batch(TWO)
    connector.send_kv_caches_and_hidden_states(model, given, caches, model(given, caches))
    running = [*THREE, 9]
    mixed = batch(TWO, running, computed=[0, 5], num_decodes=1)
    caches = fresh_caches()
    model(batch(THREE, first=1), caches)
    hidden, is_bypassed, adjusted = connector.recv_kv_caches_and_hidden_states(model, mixed, caches)
    assert (hidden, is_bypassed) == (None, False)
    assert adjusted.input_tokens.tolist() == [TWO[-1], 9]
    states = last_hidden(model(adjusted, caches), adjusted)
    assert torch.allclose(states[0], computed_locally([TWO])[0][-1], atol=1e-6)
    assert torch.allclose(states[1], computed_locally([running])[0][-1], atol=1e-6)
    connector.send_kv_caches_and_hidden_states(model, adjusted, caches, torch.stack(states))
    assert connector.counters["prompts/sent"] == 1, "a step that holds no whole prompt sends none"
    assert connector.counters["prompts/partial"] == 1


def test_tokens_whose_states_are_sampled_stay_in_the_input(connect: Connect) -> None:
    """This is the case when a request asks for the log probabilities of its prompt."""
    connector, model = connect(), Decoder()
    given, caches = batch(TWO), fresh_caches()
    connector.send_kv_caches_and_hidden_states(model, given, caches, model(given, caches))
    asked = batch(ONE, TWO, every=True)
    received = connector.recv_kv_caches_and_hidden_states(model, asked, fresh_caches())
    assert received == (None, False, asked)
    assert connector.counters["prompts/received"] == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda hidden: hidden.double(),
        lambda hidden: hidden[:, :-1],
        lambda hidden: IntermediateTensors({"hidden_states": hidden}),
    ],
)
@pytest.mark.parametrize("is_set", [False, True])
def test_states_that_cannot_be_joined_are_computed(
    connect: Connect,
    other: Callable[[Tensor], Any],
    is_set: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connector, model = connect(), Decoder()
    for prompt, change in ((ONE, None), (TWO, other)):
        given, caches = batch(prompt), fresh_caches()
        hidden: Any = model(given, caches)
        hidden = change(hidden) if change else hidden
        if is_set:
            sound = isinstance(hidden, IntermediateTensors)
            hidden = IntermediateTensors(
                {"other": model(given, caches)} if sound else {"a": hidden}
            )
        connector.send_kv_caches_and_hidden_states(model, given, caches, hidden)
    shared = list[list[int]]()

    def agreed(counts: list[int]) -> list[int]:
        shared.append(counts)
        return counts

    monkeypatch.setattr("kvshare.pre_v1.connector._minimum_over_ranks", agreed)
    caches = fresh_caches()
    received = receive(connector, [ONE, TWO], caches)
    assert (received[1], len(received[2].input_tokens)) == (False, 2)
    assert shared == [[16, 8]], "all ranks must compute the same tokens"
    assert answers([ONE, TWO], caches, received) == computed_locally([ONE, TWO])[1]


def test_states_that_share_memory_are_sent(connect: Connect) -> None:
    connector, model, caches = connect(), Decoder(), fresh_caches()
    given = batch(TWO)
    hidden = model(given, caches)
    states = IntermediateTensors({"hidden_states": hidden, "residual": hidden})
    connector.send_kv_caches_and_hidden_states(model, given, caches, states)
    found, is_bypassed, _ = receive(connector, [TWO], fresh_caches())
    assert is_bypassed
    assert torch.equal(found.tensors["residual"], hidden)


def file(**tensors: Any) -> Tensor:
    """Return a safetensors file with these headers and nine bytes of data."""
    header = json.dumps(tensors).encode()
    raw = struct.pack("<Q", len(header)) + header + bytes(9 if tensors else 0)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


@pytest.mark.parametrize(
    "states",
    [
        file(),
        file(a={"dtype": "F8_E8M0", "shape": [9], "data_offsets": [0, 9]}),
        file(
            a={"dtype": "U8", "shape": [9], "data_offsets": [0, 9]},
            b={"dtype": "F32", "shape": [1 << 62, 1 << 62, 0], "data_offsets": [9, 9]},
        ),
        file(a={"dtype": "U8", "shape": [3, 3], "data_offsets": [0, 9]}),
        torch.tensor(1, dtype=torch.uint8),
        torch.tensor(1.0),
        torch.ones(8, 4),
    ],
)
def test_malformed_states_are_computed(connect: Connect, states: Tensor) -> None:
    connector, caches = connect(), fresh_caches()
    tokens = torch.tensor(TWO)
    pages = torch.zeros(2, len(TWO), 2, 8)
    connector._buffer.insert(tokens, tokens.bool(), pages, pages, states)
    asked = batch(TWO)
    received = connector.recv_kv_caches_and_hidden_states(Decoder(), asked, caches)
    assert received == (None, False, asked)
    assert connector.counters["prompts/unfit"] == 1


def test_padding_is_never_sent(connect: Connect) -> None:
    connector, model, caches = connect(), Decoder(), fresh_caches()
    given = batch(TWO)
    hidden = model(given, caches)
    given.attn_metadata.slot_mapping[-1] = -1
    connector.send_kv_caches_and_hidden_states(model, given, caches, hidden)
    assert connector.counters == {"prompts/partial": 1}


@pytest.mark.parametrize(
    "more",
    [
        {"multi_modal_kwargs": {"pixel_values": torch.ones(1)}},
        {"inputs_embeds": torch.zeros(9, 4)},
        {"lora_requests": {"an adapter"}},
    ],
)
def test_prompts_with_media_or_adapters_are_neither_sent_nor_received(
    connect: Connect, more: dict[str, Any]
) -> None:
    """The same tokens have other KV with other pictures or adapters."""
    connector, model, caches, given = connect(), Decoder(), fresh_caches(), batch(TWO)
    other, hidden = SimpleNamespace(**vars(given), **more), model(given, caches)
    connector.send_kv_caches_and_hidden_states(model, other, caches, hidden)
    assert connector.counters == {"prompts/partial": 1}
    connector.send_kv_caches_and_hidden_states(model, given, caches, hidden)
    received = connector.recv_kv_caches_and_hidden_states(model, other, fresh_caches())
    assert received == (None, False, other)
    nothing: dict[str, Any] = {
        "multi_modal_kwargs": {},
        "inputs_embeds": None,
        "lora_requests": set(),
    }
    same = SimpleNamespace(**vars(given), **nothing)
    assert connector.recv_kv_caches_and_hidden_states(model, same, fresh_caches())[1]


def test_positions_with_several_rows_are_cut_in_every_row(connect: Connect) -> None:
    """Models with pictures have three positions per token."""
    connector, model, caches = connect(), Decoder(), fresh_caches()
    given = batch(TWO[:5])
    connector.send_kv_caches_and_hidden_states(model, given, caches, model(given, caches))
    asked = batch(TWO)
    three = replace(asked, input_positions=asked.input_positions.expand(3, -1))
    adjusted = connector.recv_kv_caches_and_hidden_states(model, three, fresh_caches())[2]
    assert torch.equal(adjusted.input_positions, three.input_positions[:, 5:])


def test_batch_with_adapters_mapped_by_token_is_computed(connect: Connect) -> None:
    connector, model, caches, given = connect(), Decoder(), fresh_caches(), batch(TWO[:5])
    connector.send_kv_caches_and_hidden_states(model, given, caches, model(given, caches))
    asked = SimpleNamespace(**vars(batch(TWO)), lora_mapping=object())
    received = connector.recv_kv_caches_and_hidden_states(model, asked, fresh_caches())
    assert received == (None, False, asked)


def test_intermediate_states_round_trip(connect: Connect) -> None:
    connector, model, caches = connect(), Decoder(), fresh_caches()
    given = batch(ONE, TWO)
    hidden = model(given, caches)
    states = IntermediateTensors({"hidden_states": hidden, "residual": hidden * 2})
    connector.send_kv_caches_and_hidden_states(model, given, caches, states)
    found, is_bypassed, _ = receive(connector, [ONE, TWO], fresh_caches())
    assert is_bypassed
    assert isinstance(found, IntermediateTensors)
    assert torch.equal(found.tensors["hidden_states"], hidden)
    assert torch.equal(found.tensors["residual"], hidden * 2)


def test_other_roles_ranks_and_options_do_not_share(connect: Connect, tmp_path: Path) -> None:
    model, caches, given = Decoder(), fresh_caches(), batch(TWO)
    hidden = model(given, caches)
    connect("kv_consumer").send_kv_caches_and_hidden_states(model, given, caches, hidden)
    assert not receive(connect(), [TWO], fresh_caches())[1], "a consumer sends nothing"
    connect().send_kv_caches_and_hidden_states(model, given, caches, hidden)
    assert not receive(connect("kv_producer"), [TWO], fresh_caches())[1]
    assert not receive(connect(rank=1), [TWO], fresh_caches())[1]
    assert not receive(connect(epoch="2"), [TWO], fresh_caches())[1]
    assert receive(connect(), [TWO], fresh_caches())[1]


def test_caches_of_another_shape_are_not_written(connect: Connect) -> None:
    connector, model, caches, given = connect(), Decoder(), fresh_caches(), batch(TWO)
    connector.send_kv_caches_and_hidden_states(model, given, caches, model(given, caches))
    smaller = [cache[..., :4].clone() for cache in fresh_caches()]
    asked = batch(TWO)
    received = connector.recv_kv_caches_and_hidden_states(model, asked, smaller)
    assert received == (None, False, asked)
    assert all(torch.equal(cache, torch.full_like(cache, -9.0)) for cache in smaller)
    assert connector.counters["prompts/unfit"] == 1


def test_unavailable_store_costs_hits(connect: Connect, tmp_path: Path) -> None:
    connector, model, caches, given = connect(), Decoder(), fresh_caches(), batch(TWO)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    (tmp_path / "store").touch()
    connector.send_kv_caches_and_hidden_states(model, given, caches, model(given, caches))
    asked = batch(TWO)
    assert connector.recv_kv_caches_and_hidden_states(model, asked, caches) == (None, False, asked)
    connector.close()
    connector.close()
