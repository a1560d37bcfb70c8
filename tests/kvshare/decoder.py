# SPDX-License-Identifier: Apache-2.0
"""A small real decoder: causal attention over a paged KV cache, driven as before V1.

`python -m tests.kvshare.decoder JOB` prefills prompts in a process of its own, and sends them.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from kvshare.pre_v1.connector import KVConnectorBase, KVShareLegacyConnector
from tests.kvshare.toy import vllm_config

LAYERS, HEADS, HEAD_SIZE, BLOCK, NUM_BLOCKS, VOCAB = 2, 2, 8, 4, 64, 97
WIDTH = HEADS * HEAD_SIZE


class Decoder(nn.Module):
    """Two layers with seeded weights, so that two processes have the same model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.place = nn.Embedding(512, WIDTH)
        self.mix = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    @torch.no_grad()
    def forward(self, model_input: Any, kv_caches: Sequence[Tensor]) -> Tensor:
        """Return the hidden states of the input's tokens, and fill the caches with their KV."""
        attention = model_input.attn_metadata
        hidden: Tensor = self.embed(model_input.input_tokens)
        hidden = hidden + self.place(model_input.input_positions)
        for mix, out, cache in zip(self.mix, self.out, kv_caches, strict=True):
            query, key, value = mix(hidden).view(-1, 3, HEADS, HEAD_SIZE).unbind(1)
            slots = attention.slot_mapping
            cache[:, slots // BLOCK, slots % BLOCK] = torch.stack((key, value))
            parts = []
            spans = pairwise(accumulate(model_input.query_lens, initial=0))
            for number, (start, end) in enumerate(spans):
                seen, own = torch.stack((key, value))[:, start:end], query[start:end]
                if attention.block_tables.numel():
                    table = attention.block_tables[number]
                    seen = cache[:, table].flatten(1, 2)[:, : attention.seq_lens[number]]
                scores = torch.einsum("qhd,khd->hqk", own, seen[0]) / HEAD_SIZE**0.5
                places = model_input.input_positions[start:end]
                hides = torch.arange(seen.shape[1])[None] > places[:, None]
                weights = scores.masked_fill(hides[None], -torch.inf).softmax(-1)
                parts.append(torch.einsum("hqk,khd->qhd", weights, seen[1]).reshape(-1, WIDTH))
            hidden = hidden + out(torch.cat(parts)).tanh()
        return hidden

    def next_token(self, hidden: Tensor) -> int:
        return int((hidden @ self.embed.weight.T).argmax())


def fresh_caches() -> list[Tensor]:
    """Return caches of garbage, so that reading an unwritten block gives wrong tokens."""
    shape = (2, NUM_BLOCKS, BLOCK, HEADS, HEAD_SIZE)
    return [torch.full(shape, -9.0) for _ in range(LAYERS)]


@dataclass(frozen=True)
class ModelInput:
    """A model input, frozen as vLLM's."""

    input_tokens: Tensor
    input_positions: Tensor
    query_lens: list[int]
    attn_metadata: Any
    sampling_metadata: Any


def batch(
    *sequences: Sequence[int],
    computed: Sequence[int] = (),
    num_decodes: int = 0,
    first: int = 0,
    every: bool = False,
) -> ModelInput:
    """Return the input that computes the tokens of `sequences` behind the first `computed` ones.

    Each sequence has 32 slots of its own, in an order of its own, from sequence number `first` on.
    The last `num_decodes` are decodes. `every`: the states of all tokens are asked for.
    """
    computed = list(computed) or [0] * len(sequences)
    tables, rows = [], []
    for number, sequence in enumerate(sequences, first):
        blocks = torch.randperm(8, generator=torch.Generator().manual_seed(number)) + 8 * number
        slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        tables.append(slots[: len(sequence)])
        rows.append(blocks.to(torch.int32))
    parts = list(zip(sequences, computed, tables, strict=True))
    lengths = [len(sequence) - before for sequence, before, _ in parts]
    attention = SimpleNamespace(
        seq_lens=[len(sequence) for sequence in sequences],
        slot_mapping=torch.cat([table[before:] for _, before, table in parts]),
        num_prefill_tokens=sum(lengths[: len(lengths) - num_decodes]),
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0),
        context_lens_tensor=torch.tensor(computed),
        max_query_len=max(lengths),
        # As vLLM: none for prompts that begin, unless there are others in the batch.
        block_tables=torch.stack(rows) if any(computed) else torch.empty(len(rows), 0).int(),
        _cached_prefill_metadata="of the prompts",
        _cached_decode_metadata="of the decodes",
    )
    ends = torch.tensor(lengths).cumsum(0)
    groups = [
        SimpleNamespace(query_len=None if number >= len(lengths) - num_decodes else length)
        for number, length in enumerate(lengths)
    ]
    sampling = SimpleNamespace(
        selected_token_indices=torch.arange(int(ends[-1])) if every else ends - 1,
        seq_groups=groups,
    )
    return ModelInput(
        query_lens=lengths,
        sampling_metadata=sampling,
        input_tokens=torch.tensor([t for sequence, c, _ in parts for t in sequence[c:]]),
        input_positions=torch.cat([torch.arange(c, len(sequence)) for sequence, c, _ in parts]),
        attn_metadata=attention,
    )


def last_hidden(hidden: Tensor, model_input: Any) -> list[Tensor]:
    """Return the hidden states of the tokens that are sampled from."""
    return [*hidden[model_input.sampling_metadata.selected_token_indices]]


def decode(
    model: Decoder, caches: Sequence[Tensor], prompts: Sequence[Sequence[int]], last: list[Tensor]
) -> list[list[int]]:
    """Decode eight tokens behind each prompt, whose KV is in the caches, all in one batch."""
    sequences = [list(prompt) for prompt in prompts]
    for _ in range(8):
        for sequence, hidden in zip(sequences, last, strict=True):
            sequence.append(model.next_token(hidden))
        computed = [len(sequence) - 1 for sequence in sequences]
        step = batch(*sequences, computed=computed, num_decodes=len(sequences))
        last = last_hidden(model(step, caches), step)
    return [s[len(p) :] for s, p in zip(sequences, prompts, strict=True)]


def prefill(connector: KVConnectorBase, batches: Sequence[Sequence[Sequence[int]]]) -> None:
    """Compute these batches of prompts and send them."""
    model, caches = Decoder(), fresh_caches()
    for prompts in batches:
        given = batch(*prompts)
        hidden = model(given, caches)
        connector.send_kv_caches_and_hidden_states(model, given, caches, hidden)


def main(job: Path) -> None:
    said = json.loads(job.read_text())
    config = vllm_config(Path(said["model"]), said["options"], "kv_producer")
    connector = KVShareLegacyConnector(0, 0, config)
    prefill(connector, said["batches"])
    print(json.dumps(connector.counters))
    connector.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
